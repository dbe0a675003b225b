// Paged attention. Included by isa.cpp alone (see vec.h).
//
// Keys are taken in blocks of KB at fixed positions, blocks in splits of kSplit. Within a split the softmax
// is online from an empty state, then splits are merged in order. A score is one fma chain over the
// dimensions, a value one fma chain over the keys of a block. So a row's bits depend on its own context alone.
//
// "Rows" here are pairs of a query row and one of the heads that share the kv head: row r is query r / G,
// head r % G. They are computed in tiles of up to AR. Pages hold keys as [dim][page], values as [page][dim], so
// that both are read in place where they are float32 in pages of whole vectors; else a block is widened once, for all
// rows of the item (quantized pools: widen_pages.h).

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

// Integers and scales of a quantized value, or of one dimension of W quantized keys.
struct PackedRow {
  const uint8_t* integers;
  const float* scales;
};

// What the next block is made of, to be asked for line by line between the arithmetic of this one: asked for at
// once it keeps all buffers for missing lines busy, and the loads of this block wait behind it.
struct Ahead {
  const char* from[KB / kKvPageUnit + 1];
  long bytes[KB / kKvPageUnit + 1];
  int count = 0, now = 0;

  void add(const void* start, long size) { from[count] = (const char*)start, bytes[count++] = size; }
  INLINE_MEMBER void ask() {
    if (now == count) return;
    __builtin_prefetch(from[now], 0, 3);
    from[now] += 64, bytes[now] -= 64;
    if (bytes[now] <= 0) ++now;
  }
};

struct Block {
  long begin;     // position of its first key
  long from, to;  // keys of it that some row sees
  const float* key[KB / W];  // vector v of dimension d is at key[v] + d * key_stride
  long key_stride;
  const float* value[KB];    // rows of at least width() floats
  bool is_packed;            // instead of the above:
  PackedRow packed_key[KB / W], packed_value[KB];
  Ahead ahead_keys, ahead_values;
};

#include "packed_block.h"

static std::size_t attention_scratch_floats(const Attention& a, long query_rows) {
  AttentionShape s(a, query_rows);
  return aligned((s.rows + AR) * a.dim) + 2 * aligned(s.state()) + KB * (a.dim + s.width() + AR);
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

struct QuantizedHeads {
  const uint8_t *keys, *values;
  long at;  // row of the position in its page
};

// The quantized page of a position, as far as it is the item's head.
INLINE QuantizedHeads heads_at(const Attention& a, const AttentionItem& item, long position) {
  long page = a.block_tables[item.sequence * a.max_pages + position / a.page];
  long head = (page * a.kv_heads + item.kv_head) * a.page;
  return {(const uint8_t*)a.keys + head * kv_row_bytes(a.format, a.dim),
          (const uint8_t*)a.values + head * kv_row_bytes(a.format, a.value_dim), position % a.page};
}

INLINE void prefetch_quantized(const Attention& a, const AttentionItem& item, long position, long end) {
  while (position < end) {
    QuantizedHeads heads = heads_at(a, item, position);
    long count = least(a.page - heads.at, KB);
    prefetch_head(a.format, heads.keys, a.page, a.dim, heads.at, count, true);
    prefetch_head(a.format, heads.values, a.page, a.value_dim, heads.at, count, false);
    position += count;
  }
}

// Whole pages line by line. Of pages longer than a block the part that it needs, at once.
static void look_ahead(const Attention& a, const AttentionItem& item, Block& block, long position, long end) {
  if (a.page > KB) return prefetch_quantized(a, item, position, end);
  for (; position < end; position += a.page) {
    QuantizedHeads heads = heads_at(a, item, position);
    block.ahead_keys.add(heads.keys, a.page * kv_row_bytes(a.format, a.dim));
    block.ahead_values.add(heads.values, a.page * kv_row_bytes(a.format, a.value_dim));
  }
}

// Points a packed block to its keys and values; vectors outside as in find_keys.
static void find_packed(const Attention& a, const AttentionItem& item, Block& block) {
  const long key_bytes = a.page * kv_row_integers(a.format, a.dim);
  const long row = kv_row_integers(a.format, a.value_dim), groups = a.value_dim / kKvGroup;
  PackedRow inside{};
  for (long v = 0; v < KB / W; ++v) {
    block.packed_key[v] = {};
    if ((v + 1) * W <= block.from || v * W >= block.to) continue;
    QuantizedHeads heads = heads_at(a, item, block.begin + v * W);
    inside = block.packed_key[v] = {heads.keys + heads.at, (const float*)(heads.keys + key_bytes) + heads.at};
  }
  for (PackedRow& key : block.packed_key)
    if (!key.integers) key = inside;
  for (long j = block.from; j < block.to;) {
    QuantizedHeads heads = heads_at(a, item, block.begin + j);
    const float* scales = (const float*)(heads.values + a.page * row);
    for (long at = heads.at; at < a.page && j < block.to; ++at, ++j)
      block.packed_value[j] = {heads.values + at * row, scales + at * groups};
  }
}

// Asks for the next block of keys and values: in decode each is read once, and pages lie anywhere.
INLINE void prefetch(const Attention& a, const AttentionItem& item, long position, long end) {
  if (is_quantized(a.format)) return prefetch_quantized(a, item, position, end);
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
    } else if (is_quantized(a.format)) {
      QuantizedHeads heads = heads_at(a, item, block.begin + v * W);
      widen_keys(a.format, heads.keys, a.page, a.dim, heads.at, to, KB);
      block.key[v] = to;
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
    if (is_quantized(a.format)) {
      const uint8_t* head = heads_at(a, item, position).values;
      for (; j < end; ++j, ++row) widen_value(a.format, head, a.page, a.value_dim, row, buffer + j * width);
    } else {
      for (const char* value = value_at(a, item, position); j < end; ++j, value += stride) {
        if (is_direct) block.value[j] = (const float*)value;
        else widen(value, a.format, a.value_dim, buffer + j * width);
      }
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
  const bool is_8 = a.format == Format::kv8;
  if (!block.is_packed) scores_of<R>(q + first * a.dim, block, a.dim, scores);
  else if (is_8) packed_scores<Format::kv8, R>(q + first * a.dim, block, a.page, a.dim, scores);
  else packed_scores<Format::kv4, R>(q + first * a.dim, block, a.page, a.dim, scores);
  float factors[R];
  for (int r = 0; r < R; ++r)
    factors[r] = from[r] < to[r] ? weigh(scores + r * KB, from[r], to[r], a.softcap, state.largest[first + r],
                                         state.total[first + r])
                                 : 1.0f;
  float* values = state.values + first * state.width;
  if (same && !block.is_packed) {
    add_values<R>(block, scores, from[0], to[0], factors, values, state.width);
    return;
  }
  if (same) {
    (is_8 ? add_packed_values<Format::kv8, R> : add_packed_values<Format::kv4, R>)(
        block, a.page, scores, from[0], to[0], factors, values, state.width);
    return;
  }
  for (int r = 0; r < R; ++r)
    if (from[r] < to[r]) {
      if (!block.is_packed)
        add_values<1>(block, scores + r * KB, from[r], to[r], factors + r, values + r * state.width, state.width);
      else
        (is_8 ? add_packed_values<Format::kv8, 1> : add_packed_values<Format::kv4, 1>)(
            block, a.page, scores + r * KB, from[r], to[r], factors + r, values + r * state.width, state.width);
    }
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
  float *packed, *keys, *value_rows, *scores, *rest;

  Scratch(const Attention& a, const AttentionShape& s, float* memory) {
    packed = memory;
    keys = packed + aligned((s.rows + AR) * a.dim);
    value_rows = keys + KB * a.dim;
    scores = value_rows + KB * s.width();
    rest = scores + KB * AR;
  }
};

static void run_split(const Attention& a, const AttentionItem& item, long split, State& state, Scratch& scratch) {
  state.clear();
  Range all = {seen(a, item, 0).begin, seen(a, item, item.num_rows - 1).end};
  long begin = most(split * kSplit, all.begin / KB * KB), end = least((split + 1) * kSplit, all.end);
  const bool is_packed = is_quantized(a.format) && state.rows <= AR && state.width == a.value_dim;
  for (long position = begin; position < end; position += KB) {
    Block block;
    block.begin = position;
    block.from = most(0, all.begin - position);
    block.to = least(KB, all.end - position);
    block.is_packed = is_packed;
    const long next_end = least(position + 2 * KB, all.end);
    if (is_packed) look_ahead(a, item, block, position + KB, next_end);
    else if (state.rows <= 2 * AR) prefetch(a, item, position + KB, next_end);
    if (is_packed) {
      find_packed(a, item, block);
    } else {
      find_keys(a, item, block, scratch.keys);
      find_values(a, item, block, scratch.value_rows);
    }
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
