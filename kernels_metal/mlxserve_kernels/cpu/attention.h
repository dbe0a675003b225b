// Paged attention. Included by isa.cpp alone (see vec.h).
//
// Keys are taken in blocks of KB at fixed positions, blocks in splits of kSplit. Within a split the softmax
// is online from an empty state, then splits are merged in order. A score is one fma chain over the
// dimensions, a value one fma chain over the keys of a block. So a row's bits depend on its own context alone.
//
// "Rows" here are pairs of a query row and one of the heads that share the kv head: row r is query r / G,
// head r % G. They are computed in tiles of up to AR, keys and values of a block are gathered once for all.

constexpr long KB = 64;
constexpr int AR = 6, AV = W == 16 ? 4 : 2;
constexpr float kNone = -__builtin_inff();

// Floats up to a whole cache line, so that vectors of 64 bytes never cross one.
INLINE long aligned(long floats) { return ceil_div(floats, 16) * 16; }

struct AttentionShape {
  long group, rows, steps;  // steps: vectors of a value row

  AttentionShape(const Attention& a, long query_rows)
      : group(a.heads / a.kv_heads), rows(query_rows * group), steps(ceil_div(a.value_dim, AV * W) * AV) {}
  long width() const { return steps * W; }
  long state() const { return rows * (width() + 2); }
};

// Softmax state of some rows: the largest score, the sum of weights, the weighted values.
struct State {
  float *largest, *total, *values;
  long rows, width;

  State(float* memory, const AttentionShape& s)
      : largest(memory), total(memory + s.rows), values(memory + 2 * s.rows), rows(s.rows), width(s.width()) {}
  void clear() {
    for (long r = 0; r < rows; ++r) largest[r] = kNone, total[r] = 0;
    for (long i = 0; i < rows * width; ++i) values[i] = 0;
  }
};

struct Block {
  long begin;             // position of its first key
  long from, to;          // keys of it that some row sees
  float* keys;            // [dim][KB]
  const float* value[KB]; // rows of at least width() floats
};

static std::size_t attention_scratch_floats(const Attention& a, long query_rows) {
  AttentionShape s(a, query_rows);
  return aligned((s.rows + AR) * a.dim) + 2 * aligned(s.state()) + KB * (2 * a.dim + s.width() + AR) + aligned(a.dim);
}

static std::size_t partial_floats(const Attention& a, long query_rows) {
  return AttentionShape(a, query_rows).state();
}

struct Range {
  long begin, end;
};

// Positions that query i of the item sees.
INLINE Range seen(const Attention& a, const AttentionItem& item, long i) {
  long end = item.first_position + i + 1;
  return {a.window ? most(0, end - a.window) : 0, end};
}

INLINE const char* row_of(const Attention& a, const void* pool, const AttentionItem& item, long position,
                          long dim) {
  long page = a.block_tables[item.sequence * a.max_pages + position / a.page];
  long row = (page * a.kv_heads + item.kv_head) * a.page + position % a.page;
  return (const char*)pool + row * dim * (a.format == Format::float32 ? 4 : 2);
}

INLINE void widen(const char* from, Format format, long n, float* to) {
  long i = 0;
  if (format == Format::float32)
    for (; i + W <= n; i += W) store(to + i, load((const float*)from + i));
  else if (format == Format::float16)
    for (; i + W <= n; i += W) store(to + i, load_half((const uint16_t*)from + i));
  else
    for (; i + W <= n; i += W) store(to + i, load_bfloat((const uint16_t*)from + i));
  for (; i < n; ++i) to[i] = load_scalar(from, format, i);
}

// rows[0 .. W)[d .. d + W) into out[d][0 .. W), a row of out being KB floats.
INLINE void transpose(const float* const* rows, long d, float* out) {
#if defined(MLXSERVE_AVX512)
  __m512 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(rows[i] + d);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[i + j]), _mm512_castps_pd(b[i + 2 + j])));
      a[i + 2 * j + 1] =
          _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[i + j]), _mm512_castps_pd(b[i + 2 + j])));
    }
  // a[4 g + c] holds column 4 l + c of rows 4 g .. 4 g + 3 in its 128-bit lane l.
  for (int c = 0; c < 4; ++c) {
    __m512 low01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x44), high01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xee);
    __m512 low23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x44);
    __m512 high23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xee);
    _mm512_storeu_ps(out + (d + c) * KB, _mm512_shuffle_f32x4(low01, low23, 0x88));
    _mm512_storeu_ps(out + (d + 4 + c) * KB, _mm512_shuffle_f32x4(low01, low23, 0xdd));
    _mm512_storeu_ps(out + (d + 8 + c) * KB, _mm512_shuffle_f32x4(high01, high23, 0x88));
    _mm512_storeu_ps(out + (d + 12 + c) * KB, _mm512_shuffle_f32x4(high01, high23, 0xdd));
  }
#else
  for (long i = 0; i < W; i += 4)
    for (long j = 0; j < W; j += 4) {
      typedef int i4 __attribute__((vector_size(16)));
      typedef float v4u __attribute__((vector_size(16), aligned(4), may_alias));
      v4 r0 = (v4) * (const v4u*)(rows[i] + d + j), r1 = (v4) * (const v4u*)(rows[i + 1] + d + j);
      v4 r2 = (v4) * (const v4u*)(rows[i + 2] + d + j), r3 = (v4) * (const v4u*)(rows[i + 3] + d + j);
      v4 t0 = __builtin_shuffle(r0, r1, (i4){0, 4, 1, 5}), t1 = __builtin_shuffle(r0, r1, (i4){2, 6, 3, 7});
      v4 t2 = __builtin_shuffle(r2, r3, (i4){0, 4, 1, 5}), t3 = __builtin_shuffle(r2, r3, (i4){2, 6, 3, 7});
      *(v4u*)(out + (d + j) * KB + i) = (v4u)__builtin_shuffle(t0, t2, (i4){0, 1, 4, 5});
      *(v4u*)(out + (d + j + 1) * KB + i) = (v4u)__builtin_shuffle(t0, t2, (i4){2, 3, 6, 7});
      *(v4u*)(out + (d + j + 2) * KB + i) = (v4u)__builtin_shuffle(t1, t3, (i4){0, 1, 4, 5});
      *(v4u*)(out + (d + j + 3) * KB + i) = (v4u)__builtin_shuffle(t1, t3, (i4){2, 3, 6, 7});
    }
#endif
}

// Asks for the next block of keys and values: in decode each is read once, and pages lie anywhere.
INLINE void prefetch(const Attention& a, const AttentionItem& item, long position, long end) {
  long item_size = a.format == Format::float32 ? 4 : 2;
  for (; position < end; ++position) {
    const char* key = row_of(a, a.keys, item, position, a.dim);
    const char* value = row_of(a, a.values, item, position, a.value_dim);
    for (long i = 0; i < a.dim * item_size; i += 64) __builtin_prefetch(key + i, 0, 2);
    for (long i = 0; i < a.value_dim * item_size; i += 64) __builtin_prefetch(value + i, 0, 2);
  }
}

// Keys outside of [from, to) become zeros: what lies in their slots is never read.
static void gather(const Attention& a, const AttentionItem& item, Block& block, float* key_rows, float* value_rows,
                   float* zeros) {
  long width = AttentionShape(a, 1).width();
  const float* rows[KB];
  for (long j = 0; j < KB; ++j) {
    if (j < block.from || j >= block.to) {
      rows[j] = zeros;
      block.value[j] = nullptr;
      continue;
    }
    const char* key = row_of(a, a.keys, item, block.begin + j, a.dim);
    const char* value = row_of(a, a.values, item, block.begin + j, a.value_dim);
    if (a.format == Format::float32) {
      rows[j] = (const float*)key;
    } else {
      widen(key, a.format, a.dim, key_rows + j * a.dim);
      rows[j] = key_rows + j * a.dim;
    }
    if (a.format == Format::float32 && a.value_dim == width) {
      block.value[j] = (const float*)value;
    } else {
      float* to = value_rows + j * width;
      widen(value, a.format, a.value_dim, to);
      for (long i = a.value_dim; i < width; ++i) to[i] = 0;
      block.value[j] = to;
    }
  }
  for (long j = 0; j < KB; j += W) {
    long d = 0;
    for (; d + W <= a.dim; d += W) transpose(rows + j, d, block.keys + j);
    for (; d < a.dim; ++d)
      for (long l = 0; l < W; ++l) block.keys[d * KB + j + l] = rows[j + l][d];
  }
}

template <int R>
INLINE void scores_of(const float* q, const float* keys, long dim, float* scores) {
  for (long j = 0; j < KB; j += AV * W) {
    vf acc[R][AV];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < AV; ++v) acc[r][v] = (vf){};
    for (long d = 0; d < dim; ++d) {
      vf k[AV];
      for (int v = 0; v < AV; ++v) k[v] = load(keys + d * KB + j + v * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        vf x = splat(q[d * R + r]);
#pragma GCC unroll 8
        for (int v = 0; v < AV; ++v) acc[r][v] = fma(x, k[v], acc[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < AV; ++v) store(scores + r * KB + j + v * W, acc[r][v]);
  }
}

// Scores of one row into weights, in place; returns the factor for what the row has summed so far.
INLINE float weigh(float* scores, long from, long to, float softcap, float& largest, float& total) {
  vf top = splat(kNone);
  for (long j = 0; j < KB; j += W) {
    vf s = load(scores + j);
    if (softcap != 0) s = softcap * tanh_of(s / softcap);
    if (j < from || j + W > to) {
      vi lane;
      for (int l = 0; l < W; ++l) lane[l] = (int)j + l;
      s = (lane >= (int)from) & (lane < (int)to) ? s : splat(kNone);
    }
    store(scores + j, s);
    top = greater(s, top);
  }
  float now = greatest(top);
  now = now > largest ? now : largest;
  float factor = exp_negative(largest - now);
  vf sums = {};
  for (long j = 0; j < KB; j += W) {
    vf p = exp_negative(load(scores + j) - now);
    if (j < from || j + W > to)
      for (int l = 0; l < W; ++l)
        if (j + l < from || j + l >= to) p[l] = 0;
    store(scores + j, p);
    sums += p;
  }
  total = total * factor + sum(sums);
  largest = now;
  return factor;
}

template <int R>
INLINE void add_values(const Block& block, const float* weights, long from, long to, const float* factors,
                       float* values, long width) {
  for (long i = 0; i < width; i += AV * W) {
    vf acc[R][AV];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < AV; ++v) acc[r][v] = load(values + r * width + i + v * W) * factors[r];
    for (long j = from; j < to; ++j) {
      vf x[AV];
      for (int v = 0; v < AV; ++v) x[v] = load(block.value[j] + i + v * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        vf p = splat(weights[r * KB + j]);
#pragma GCC unroll 8
        for (int v = 0; v < AV; ++v) acc[r][v] = fma(p, x[v], acc[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < AV; ++v) store(values + r * width + i + v * W, acc[r][v]);
  }
}

template <int R>
static void attend_tile(const Attention& a, const AttentionItem& item, const Block& block, long first,
                        const float* q, State& state, float* scores) {
  long group = a.heads / a.kv_heads;
  long from[R], to[R];
  bool any = false, same = true;
  for (int r = 0; r < R; ++r) {
    Range s = seen(a, item, (first + r) / group);
    from[r] = most(0, s.begin - block.begin);
    to[r] = least(KB, s.end - block.begin);
    any |= from[r] < to[r];
    same &= from[r] == from[0] && to[r] == to[0];
  }
  if (!any) return;
  scores_of<R>(q + first * a.dim, block.keys, a.dim, scores);
  float factors[R];
  for (int r = 0; r < R; ++r)
    factors[r] = from[r] < to[r] ? weigh(scores + r * KB, from[r], to[r], a.softcap, state.largest[first + r],
                                         state.total[first + r])
                                 : 1.0f;
  float* values = state.values + first * state.width;
  if (same) {
    add_values<R>(block, scores, from[0], to[0], factors, values, state.width);
    return;
  }
  for (int r = 0; r < R; ++r)
    if (from[r] < to[r])
      add_values<1>(block, scores + r * KB, from[r], to[r], factors + r, values + r * state.width, state.width);
}

// Queries, scaled, as [tile][dim][rows of the tile].
static void pack_queries(const Attention& a, const AttentionItem& item, float* packed) {
  long group = a.heads / a.kv_heads, rows = item.num_rows * group;
  for (long first = 0; first < rows; first += AR) {
    long count = least(AR, rows - first);
    for (long r = 0; r < count; ++r) {
      long row = first + r;
      const float* q = a.q + ((item.row_begin + row / group) * a.heads + item.kv_head * group + row % group) * a.dim;
      for (long d = 0; d < a.dim; ++d) packed[first * a.dim + d * count + r] = q[d] * a.scale;
    }
  }
}

struct Scratch {
  float *packed, *keys, *key_rows, *value_rows, *scores, *zeros, *rest;

  Scratch(const Attention& a, const AttentionShape& s, float* memory) {
    packed = memory;
    keys = packed + aligned((s.rows + AR) * a.dim);
    key_rows = keys + KB * a.dim;
    value_rows = key_rows + KB * a.dim;
    scores = value_rows + KB * s.width();
    zeros = scores + KB * AR;
    rest = zeros + aligned(a.dim);
    for (long d = 0; d < a.dim; ++d) zeros[d] = 0;
  }
};

static void run_split(const Attention& a, const AttentionItem& item, long split, State& state, Scratch& scratch) {
  state.clear();
  Range all = {seen(a, item, 0).begin, seen(a, item, item.num_rows - 1).end};
  long begin = most(split * kSplit, all.begin / KB * KB), end = least((split + 1) * kSplit, all.end);
  for (long position = begin; position < end; position += KB) {
    Block block;
    block.begin = position;
    block.from = most(0, all.begin - position);
    block.to = least(KB, all.end - position);
    block.keys = scratch.keys;
    if (state.rows <= 2 * AR) prefetch(a, item, position + KB, least(position + 2 * KB, all.end));
    gather(a, item, block, scratch.key_rows, scratch.value_rows, scratch.zeros);
    for (long first = 0; first < state.rows; first += AR) {
      switch (state.rows - first) {
        case 1: attend_tile<1>(a, item, block, first, scratch.packed, state, scratch.scores); break;
        case 2: attend_tile<2>(a, item, block, first, scratch.packed, state, scratch.scores); break;
        case 3: attend_tile<3>(a, item, block, first, scratch.packed, state, scratch.scores); break;
        case 4: attend_tile<4>(a, item, block, first, scratch.packed, state, scratch.scores); break;
        case 5: attend_tile<5>(a, item, block, first, scratch.packed, state, scratch.scores); break;
        default: attend_tile<AR>(a, item, block, first, scratch.packed, state, scratch.scores);
      }
    }
  }
}

// Rows that saw nothing in the part keep their bits.
static void merge(State& state, const State& part) {
  for (long r = 0; r < state.rows; ++r) {
    if (part.total[r] == 0 && part.largest[r] == kNone) continue;
    float now = part.largest[r] > state.largest[r] ? part.largest[r] : state.largest[r];
    float old_factor = state.total[r] == 0 ? 0.0f : exp_negative(state.largest[r] - now);
    float new_factor = exp_negative(part.largest[r] - now);
    state.total[r] = state.total[r] * old_factor + part.total[r] * new_factor;
    state.largest[r] = now;
    float *to = state.values + r * state.width, *from = part.values + r * state.width;
    for (long i = 0; i < state.width; i += W)
      store(to + i, load(to + i) * old_factor + load(from + i) * new_factor);
  }
}

static void finish(const Attention& a, const AttentionItem& item, State& state) {
  long group = a.heads / a.kv_heads;
  for (long r = 0; r < state.rows; ++r) {
    long head = item.kv_head * group + r % group;
    float factor = 1, total = state.total[r];
    if (a.sinks) {
      float now = a.sinks[head] > state.largest[r] ? a.sinks[head] : state.largest[r];
      factor = exp_negative(state.largest[r] - now);
      total = total * factor + exp_negative(a.sinks[head] - now);
    }
    float* out = a.out + ((item.row_begin + r / group) * a.heads + head) * a.value_dim;
    for (long i = 0; i < a.value_dim; ++i) out[i] = state.values[r * state.width + i] * factor / total;
  }
}

INLINE Range splits_of(const Attention& a, const AttentionItem& item) {
  return {seen(a, item, 0).begin / kSplit, ceil_div(seen(a, item, item.num_rows - 1).end, kSplit)};
}

static void attend_split(const Attention& a, const AttentionItem& item, long split, float* partial, float* memory) {
  AttentionShape shape(a, item.num_rows);
  Scratch scratch(a, shape, memory);
  State state(partial, shape);
  pack_queries(a, item, scratch.packed);
  run_split(a, item, split, state, scratch);
}

static void attend_merge(const Attention& a, const AttentionItem& item, const float* partials, float* memory) {
  AttentionShape shape(a, item.num_rows);
  State state(memory, shape);
  state.clear();
  Range splits = splits_of(a, item);
  for (long split = splits.begin; split < splits.end; ++split)
    merge(state, State(const_cast<float*>(partials) + (split - splits.begin) * shape.state(), shape));
  finish(a, item, state);
}

static void attend_whole(const Attention& a, const AttentionItem& item, float* memory) {
  AttentionShape shape(a, item.num_rows);
  Scratch scratch(a, shape, memory);
  State state(scratch.rest, shape), part(scratch.rest + aligned(shape.state()), shape);
  state.clear();
  pack_queries(a, item, scratch.packed);
  Range splits = splits_of(a, item);
  for (long split = splits.begin; split < splits.end; ++split) {
    run_split(a, item, split, part, scratch);
    merge(state, part);
  }
  finish(a, item, state);
}
