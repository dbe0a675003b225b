// Paged attention. Included by isa.cpp alone (see vec.h).
//
// Keys are taken in blocks of KB at fixed positions, blocks in splits of kSplit. Within a split the softmax
// is online from an empty state, then splits are merged in order. A score is one fma chain over the
// dimensions, a value one fma chain over the keys of a block. So a row's bits depend on its own context alone.
//
// "Rows" here are pairs of a query row and one of the heads that share the kv head: row r is query r / G,
// head r % G. They are computed in tiles of up to AR. Pages hold keys as [dim][page], values as [page][dim], so
// that both are read in place where they are float32 in pages of whole vectors; narrower floats are widened once a
// block, for all rows of the item. Quantized pages are read as they are, see packed_block.h.

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

#include "packed_block.h"

struct Block {
  long begin;     // position of its first key
  long from, to;  // keys of it that some row sees
  const float* key[KB / W];  // vector v of dimension d is at key[v] + d * key_stride
  long key_stride;
  const float* value[KB];    // rows of at least width() floats
  PackedBlock packed;  // of quantized pages, instead of the above
};

// Memory of an item.
struct Scratch {
  float *queries, *sums;              // [rows][dim], scaled; for quantized pages, sums of their groups
  float *keys, *value_rows;           // a widened block of keys [dim][KB], of values [KB][width]
  float *value_scales, *scaled;       // for quantized pages: [2][groups][KB]; see add_packed_values
  float *scores, *rest;               // [AR][KB]; two states
  long used = 0;                      // floats before `rest`

  Scratch(const Attention& a, const AttentionShape& s, float* memory) {
    const long is_packed = is_quantized(a.format), is_float = !is_packed;
    auto take = [&](long floats) {
      float* taken = memory ? memory + used : nullptr;
      used += aligned(floats);
      return taken;
    };
    queries = take(s.rows * a.dim);
    sums = take(is_packed * s.rows * a.dim / kKvGroup);
    keys = take(is_float * KB * a.dim);
    value_rows = take(is_float * KB * s.width());
    value_scales = take(is_packed * 2 * a.value_dim / kKvGroup * KB);
    scaled = take(is_packed * kScaledGroups * AR * KB);
    scores = take(AR * KB);
    rest = take(0);
  }
};

static std::size_t attention_scratch_floats(const Attention& a, long query_rows) {
  AttentionShape s(a, query_rows);
  return Scratch(a, s, nullptr).used + 2 * aligned(s.state());
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

INLINE long item_size(Format format) { return format == Format::float32 ? 4 : 2; }

INLINE const char* value_at(const Attention& a, const AttentionItem& item, long position) {
  long page = a.block_tables[item.sequence * a.max_pages + position / a.page];
  long row = (page * a.kv_heads + item.kv_head) * a.page + position % a.page;
  return (const char*)a.values + row * a.value_dim * item_size(a.format);
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

// Dimension 0 of the key at a position; dimension d is d * page items on, the next position of the page is next.
INLINE const char* key_at(const Attention& a, const AttentionItem& item, long position) {
  long page = a.block_tables[item.sequence * a.max_pages + position / a.page];
  long row = (page * a.kv_heads + item.kv_head) * a.dim;
  return (const char*)a.keys + (row * a.page + position % a.page) * item_size(a.format);
}

#include "packed_pages.h"

// Asks for the next block of keys and values: in decode each is read once, and pages lie anywhere.
INLINE void prefetch(const Attention& a, const AttentionItem& item, long position, long end) {
  const long size = item_size(a.format);
  if (a.page % KB == 0 || KB % a.page == 0)
    for (long p = position; p < end; p += 64 / size)
      for (long d = 0; d < a.dim; ++d) __builtin_prefetch(key_at(a, item, p) + d * a.page * size, 0, 2);
  for (; position < end; ++position) {
    const char* value = value_at(a, item, position);
    for (long i = 0; i < a.value_dim * size; i += 64) __builtin_prefetch(value + i, 0, 2);
  }
}

INLINE vf load_widened(const char* from, Format format) {
  if (format == Format::float32) return load((const float*)from);
  return format == Format::float16 ? load_half((const uint16_t*)from) : load_bfloat((const uint16_t*)from);
}

// Points the block to its keys. Vectors wholly outside of [from, to) get another one of the block: their scores
// are never used.
static void find_keys(const Attention& a, const AttentionItem& item, Block& block, float* buffer) {
  const bool is_whole = a.page % W == 0;
  const long size = item_size(a.format);
  const bool is_direct = is_whole && a.format == Format::float32;
  block.key_stride = is_direct ? a.page : KB;
  const float* inside = nullptr;
  for (long v = 0; v < KB / W; ++v) {
    block.key[v] = nullptr;
    if ((v + 1) * W <= block.from || v * W >= block.to) continue;
    float* to = buffer + v * W;
    if (is_direct) {
      block.key[v] = (const float*)key_at(a, item, block.begin + v * W);
    } else if (is_whole) {
      const char* from = key_at(a, item, block.begin + v * W);
      for (long d = 0; d < a.dim; ++d) store(to + d * KB, load_widened(from + d * a.page * size, a.format));
      block.key[v] = to;
    } else {
      for (long d = 0; d < a.dim; ++d) store(to + d * KB, (vf){});
      for (long j = most(v * W, block.from); j < least((v + 1) * W, block.to); ++j) {
        const char* from = key_at(a, item, block.begin + j);
        for (long d = 0; d < a.dim; ++d)
          to[d * KB + j - v * W] = load_scalar(from + d * a.page * size, a.format, 0);
      }
      block.key[v] = to;
    }
    inside = block.key[v];
  }
  for (const float*& key : block.key)
    if (!key) key = inside;
}

static void find_values(const Attention& a, const AttentionItem& item, Block& block, float* buffer) {
  const long width = AttentionShape(a, 1).width(), stride = a.value_dim * item_size(a.format);
  const bool is_direct = a.format == Format::float32 && a.value_dim == width;
  for (long j = block.from; j < block.to;) {
    // As many rows as lie on the page: to find a page takes divisions.
    long position = block.begin + j, row = position % a.page, end = least(block.to, j + a.page - row);
    for (const char* value = value_at(a, item, position); j < end; ++j, value += stride) {
      if (is_direct) block.value[j] = (const float*)value;
      else widen(value, a.format, a.value_dim, buffer + j * width);
    }
  }
  if (is_direct) return;
  for (long j = block.from; j < block.to; ++j) {
    float* to = buffer + j * width;
    for (long i = a.value_dim; i < width; ++i) to[i] = 0;
    block.value[j] = to;
  }
}

template <int R>
INLINE void scores_of(const float* q, const Block& block, long dim, float* scores) {
  for (long j = 0; j < KB; j += AV * W) {
    const float* const* key = block.key + j / W;
    vf acc[R][AV];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < AV; ++v) acc[r][v] = (vf){};
    for (long d = 0; d < dim; ++d) {
      vf k[AV];
      for (int v = 0; v < AV; ++v) k[v] = load(key[v] + d * block.key_stride);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        vf x = splat(q[r * dim + d]);
#pragma GCC unroll 8
        for (int v = 0; v < AV; ++v) acc[r][v] = fma(x, k[v], acc[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < AV; ++v) store(scores + r * KB + j + v * W, acc[r][v]);
  }
}

// Scores of one row, capped and masked, in place; returns the largest.
template <bool IsWhole>
INLINE float mask_scores(float* scores, long from, long to, float softcap) {
  vf top = splat(kNone);
  for (long j = 0; j < KB; j += W) {
    vf s = load(scores + j);
    if (softcap != 0) s = softcap * tanh_of(s / softcap);
    if (!IsWhole && (j < from || j + W > to)) {
      vi lane;
      for (int l = 0; l < W; ++l) lane[l] = (int)j + l;
      s = (lane >= (int)from) & (lane < (int)to) ? s : splat(kNone);
    }
    if (!IsWhole || softcap != 0) store(scores + j, s);
    top = greater(s, top);
  }
  return greatest(top);
}

// Scores into weights, in place; returns their sum.
template <bool IsWhole>
INLINE float weights_of(float* scores, long from, long to, float largest) {
  vf sums = {};
  for (long j = 0; j < KB; j += W) {
    vf p = exp_negative(load(scores + j) - largest);
    if (!IsWhole) p = within(p, j, from, to);
    store(scores + j, p);
    sums += p;
  }
  return sum(sums);
}

// Scores of R rows into weights, in place, and the factors for what the rows have summed so far. Rows that see nothing
// of the block (from >= to) keep what they have.
template <int R>
INLINE void weigh(float* scores, const long* from, const long* to, float softcap, float* largest, float* total,
                  float* factors) {
  constexpr int lanes = (R + W - 1) / W * W;
  float change[lanes] = {}, now[R];
  for (int r = 0; r < R; ++r) {
    if (from[r] >= to[r]) continue;
    float* row = scores + r * KB;
    const bool is_whole = from[r] == 0 && to[r] == KB;
    const float top = is_whole ? mask_scores<true>(row, 0, KB, softcap)
                               : mask_scores<false>(row, from[r], to[r], softcap);
    now[r] = top > largest[r] ? top : largest[r];
    change[r] = largest[r] - now[r];
  }
  for (int r = 0; r < lanes; r += W) store(change + r, exp_negative(load(change + r)));
  for (int r = 0; r < R; ++r) {
    factors[r] = change[r];
    if (from[r] >= to[r]) continue;
    float* row = scores + r * KB;
    const bool is_whole = from[r] == 0 && to[r] == KB;
    const float sums = is_whole ? weights_of<true>(row, 0, KB, now[r]) : weights_of<false>(row, from[r], to[r], now[r]);
    total[r] = total[r] * factors[r] + sums;
    largest[r] = now[r];
  }
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
INLINE void add_weighted(const Attention& a, const Block& block, const float* weights, long from, long to,
                         const float* factors, float* values, long width, float* scaled) {
  if (!is_quantized(a.format))
    add_values<R>(block, weights, from, to, factors, values, width);
  else
    (a.format == Format::kv8 ? add_packed_values<Format::kv8, R> : add_packed_values<Format::kv4, R>)(
        block.packed, weights, from, to, factors, values, width, a.value_dim, scaled);
}

template <int R>
static void attend_tile(const Attention& a, const AttentionItem& item, const Block& block, long first,
                        const Scratch& scratch, State& state) {
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
  const float *q = scratch.queries + first * a.dim, *sums = scratch.sums + first * (a.dim / kKvGroup);
  float* scores = scratch.scores;
  if (!is_quantized(a.format)) scores_of<R>(q, block, a.dim, scores);
  else
    (a.format == Format::kv8 ? packed_scores<Format::kv8, R> : packed_scores<Format::kv4, R>)(
        q, sums, block.packed, a.page, a.dim, scores);
  float factors[R];
  weigh<R>(scores, from, to, a.softcap, state.largest + first, state.total + first, factors);
  float* values = state.values + first * state.width;
  if (same) return add_weighted<R>(a, block, scores, from[0], to[0], factors, values, state.width, scratch.scaled);
  for (int r = 0; r < R; ++r)
    if (from[r] < to[r])
      add_weighted<1>(a, block, scores + r * KB, from[r], to[r], factors + r, values + r * state.width, state.width,
                      scratch.scaled);
}

static void load_queries(const Attention& a, const AttentionItem& item, const Scratch& scratch) {
  const long group = a.heads / a.kv_heads, rows = item.num_rows * group;
  for (long row = 0; row < rows; ++row) {
    const float* q = a.q + ((item.row_begin + row / group) * a.heads + item.kv_head * group + row % group) * a.dim;
    float* to = scratch.queries + row * a.dim;
    for (long d = 0; d < a.dim; ++d) to[d] = q[d] * a.scale;
    if (a.format != Format::kv4) continue;
    for (long g = 0; g < a.dim / kKvGroup; ++g) {
      vf sums = {};
      for (long d = 0; d < kKvGroup; d += W) sums += load(to + g * kKvGroup + d);
      scratch.sums[row * (a.dim / kKvGroup) + g] = sum(sums);
    }
  }
}

static void run_split(const Attention& a, const AttentionItem& item, long split, State& state,
                      const Scratch& scratch) {
  state.clear();
  Range all = {seen(a, item, 0).begin, seen(a, item, item.num_rows - 1).end};
  long begin = most(split * kSplit, all.begin / KB * KB), end = least((split + 1) * kSplit, all.end);
  for (long position = begin; position < end; position += KB) {
    Block block;
    block.begin = position;
    block.from = most(0, all.begin - position);
    block.to = least(KB, all.end - position);
    const long next_end = least(position + 2 * KB, all.end);
    if (is_quantized(a.format)) {
      find_packed(a, item, block, scratch.value_scales);
      if (state.rows <= 2 * AR) look_ahead(a, item, block.packed, position + KB, next_end);
    } else {
      if (state.rows <= 2 * AR) prefetch(a, item, position + KB, next_end);
      find_keys(a, item, block, scratch.keys);
      find_values(a, item, block, scratch.value_rows);
    }
    for (long first = 0; first < state.rows; first += AR) {
      switch (state.rows - first) {
        case 1: attend_tile<1>(a, item, block, first, scratch, state); break;
        case 2: attend_tile<2>(a, item, block, first, scratch, state); break;
        case 3: attend_tile<3>(a, item, block, first, scratch, state); break;
        case 4: attend_tile<4>(a, item, block, first, scratch, state); break;
        case 5: attend_tile<5>(a, item, block, first, scratch, state); break;
        default: attend_tile<AR>(a, item, block, first, scratch, state);
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
  load_queries(a, item, scratch);
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
  load_queries(a, item, scratch);
  Range splits = splits_of(a, item);
  for (long split = splits.begin; split < splits.end; ++split) {
    run_split(a, item, split, part, scratch);
    merge(state, part);
  }
  finish(a, item, state);
}
