// y[M, K] = x[M, N] @ w[N, K]. Included by isa.cpp alone (see vec.h), behind matmul.h.
//
// The order of a sum: the terms n of each kDepth rows of w by fma from 0, these sums one after the other. So a value
// depends on its row of x and its column of w alone, and long sums round little.

constexpr long kDepth = 64;          // rows of w that are unpacked at a time
constexpr int kColumnRows = W == 16 ? 8 : 6;  // rows of x that share what is loaded of w

// A panel takes some bytes of each row, which the hardware does not foresee: they are asked for so many rows before.
constexpr long kAhead = 16;

// Values of tiles, with the interface of the readers in matmul.h.
template <Format F, Format S>
struct ReadTile {
  const char* tile;
  const uint8_t* values;
  long lane, group_bytes, size, first, begin;
  vf scale, bias;

  INLINE_MEMBER void open(const Weight& w, long n) {
    group_bytes = tile_group_bytes(w), size = w.group, lane = n % kTile;
    tile = (const char*)w.data + n / kTile * (w.k / w.group) * group_bytes;
  }
  INLINE_MEMBER void prefetch(const Weight&, long, long, long) const {}
  INLINE_MEMBER void widen(long g, long) { first = g; }
  INLINE_MEMBER void prefetch_scales(const Weight&, long, long, long) const {}
  INLINE_MEMBER void group(unsigned i) {
    const char* head = tile + (first + i) * group_bytes;
    scale = splat(load_scalar(head, S, lane)), bias = splat(load_scalar(head, S, kTile + lane));
    values = (const uint8_t*)head + 2 * kTile * (S == Format::float32 ? 4 : 2);
    begin = (first + i) * size;
  }
  // Four values of one lane stand together.
  INLINE_MEMBER vf vector(long k) const {
    uint32_t fours[W / 4];
    for (int i = 0; i < W / 4; ++i) {
      const long at = k - begin + 4 * i;
      if constexpr (F == Format::tiles8) {
        __builtin_memcpy(fours + i, values + at * kTile + lane * 4, 4);
      } else {
        __builtin_memcpy(fours + i, values + at / 8 * kTile * 4 + lane * 4, 4);
        fours[i] = fours[i] >> (at % 8) & 0x0f0f0f0f;
      }
    }
    return scale * to_floats(load_unsigned((const uint8_t*)fours)) + bias;
  }
};

template <Format S>
using ReadTile4 = ReadTile<Format::tiles4, S>;
template <Format S>
using ReadTile8 = ReadTile<Format::tiles8, S>;

template <class Body>
INLINE void with_any_reader(const Weight& w, Body&& body) {
  if (w.format == Format::tiles4) return with_reader<ReadTile4>(w.scale_format, body);
  if (w.format == Format::tiles8) return with_reader<ReadTile8>(w.scale_format, body);
  with_reader(w, body);
}

static void read_row(const Weight& w, long n, float* to) {
  with_any_reader(w, [&]<class R>() {
    R reader;
    reader.open(w, n);
    for_chunks(
        w, [&](long g, long count) INLINE_LAMBDA { reader.widen(g, count); },
        [&](long k, unsigned group) INLINE_LAMBDA {
          reader.group(group);
          for (int i = 0; i < CHUNK; i += W) store(to + k + i, reader.vector(k + i));
        });
    if constexpr (is_dense<R>) {
      long k = w.k / CHUNK * CHUNK;
      for (; k + W <= w.k; k += W) store(to + k, reader.vector(k));
      if (k < w.k) store_first(to + k, reader.rest(k, w.k - k), w.k - k);
    }
  });
}

// Columns begin to end - 1 of row n of w, zeros behind them up to a whole number of 2 W; begin is a multiple of CHUNK,
// and so is end where groups are.
template <class R>
INLINE void fill_row(const Weight& w, long n, long begin, long end, float* to) {
  R reader;
  reader.open(w, n);
  if constexpr (is_dense<R>) {
    long k = begin;
    for (; k + W <= end; k += W) store(to + k - begin, reader.vector(k));
    if (k < end) store(to + k - begin, reader.rest(k, end - k)), k += W;
    if ((k - begin) / W % 2) store(to + k - begin, (vf){});
    return;
  }
  const int shift = group_shift(w);
  const long first = begin >> shift;
  reader.widen(first, ceil_div(end, 1L << shift) - first);
  reader.prefetch_scales(w, first, kAhead, 1);
  for (long k = begin; k < end; k += CHUNK) {
    reader.prefetch(w, k, kAhead, 1);
    reader.group((unsigned)((k >> shift) - first));
    for (int i = 0; i < CHUNK; i += W) store(to + k + i - begin, reader.vector(k + i));
  }
}

// Where the widened values of x stand: rows of kDepth, or, IS_TURNED, kTurned from one n to the next.
constexpr long kTurned = kMaxColumnRows + 16;  // no power of two, whose lines would share few sets of a cache

// M rows of x times V vectors of each row of the panel, on top of y.
template <bool IS_TURNED, int M, int V>
INLINE void add_columns(const float* x, const float* panel, long depth, float* y, bool is_first) {
  vf acc[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[m][v] = (vf){};
  for (long n = 0; n < depth; ++n, x += IS_TURNED ? kTurned : 1, panel += kColumns) {
    vf row[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) row[v] = load(panel + v * W);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      vf factor = splat(x[IS_TURNED ? m : m * kDepth]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[m][v] = fma(row[v], factor, acc[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* to = y + m * kColumns + v * W;
      store(to, is_first ? acc[m][v] : load(to) + acc[m][v]);
    }
}

template <bool IS_TURNED, int M>
static void add_rows(const float* x, const float* panel, long depth, long width, float* y, bool is_first) {
  // Few rows need more columns to keep the units busy.
  constexpr int V = M <= 2 ? 4 : 2;
  long col = 0;
  for (; col + V * W <= width; col += V * W) add_columns<IS_TURNED, M, V>(x, panel + col, depth, y + col, is_first);
  for (; col < width; col += 2 * W) add_columns<IS_TURNED, M, 2>(x, panel + col, depth, y + col, is_first);
}

template <bool IS_TURNED>
static void add_some_rows(long rows, const float* x, const float* panel, long depth, long width, float* y,
                          bool is_first) {
  auto add = [&]<int M>() { add_rows<IS_TURNED, M>(x, panel, depth, width, y, is_first); };
  switch (rows) {
    case 1: return add.template operator()<1>();
    case 2: return add.template operator()<2>();
    case 3: return add.template operator()<3>();
    case 4: return add.template operator()<4>();
    case 5: return add.template operator()<5>();
    case 6: return add.template operator()<6>();
    case 7: return add.template operator()<7>();
    case 8: return add.template operator()<8>();
  }
}

static std::size_t columns_floats() {
  return kDepth * kColumns + kMaxColumnRows * kColumns + kDepth * kTurned;
}

static void matmul_columns(const Weight& w, const ColumnsTile& t, float* scratch) {
  float *panel = scratch, *sums = panel + kDepth * kColumns, *x = sums + kMaxColumnRows * kColumns;
  const long count = t.col_end - t.col_begin, width = ceil_div(count, 2 * W) * 2 * W, rows = t.row_end - t.row_begin;
  const long x_size = t.x_format == Format::float32 ? 4 : 2, y_size = t.y_format == Format::float32 ? 4 : 2;
  auto x_at = [&](long row, long n) { return (const char*)t.x + (t.is_turned ? n * t.x_ld + row : row * t.x_ld + n) * x_size; };
  for (long begin = 0; begin < w.n; begin += kDepth) {
    const long depth = least(kDepth, w.n - begin);
    with_any_reader(w, [&]<class R>() {
      for (long n = 0; n < depth; ++n) fill_row<R>(w, begin + n, t.col_begin, t.col_end, panel + n * kColumns);
    });
    if (t.is_turned)
      for (long n = 0; n < depth; ++n) widen(t.x_format, x_at(t.row_begin, begin + n), rows, x + n * kTurned);
    for (long row = 0; row < rows; row += kColumnRows) {
      const long some = least(kColumnRows, rows - row);
      if (t.is_turned) {
        add_some_rows<true>(some, x + row, panel, depth, width, sums + row * kColumns, begin == 0);
        continue;
      }
      for (long m = 0; m < some; ++m) widen(t.x_format, x_at(t.row_begin + row + m, begin), depth, x + m * kDepth);
      add_some_rows<false>(some, x, panel, depth, width, sums + row * kColumns, begin == 0);
    }
  }
  for (long row = 0; row < rows; ++row)
    narrow(t.y_format, sums + row * kColumns, count, (char*)t.y + ((t.row_begin + row) * t.y_ld + t.col_begin) * y_size);
}
