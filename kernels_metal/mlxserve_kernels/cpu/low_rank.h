// Low-rank changes of a product. Included by isa.cpp alone (see vec.h).
//
// The order of a sum: of x @ a, chain i takes rows begin + i, begin + kChains + i, ... of `a` (a rest goes to the first
// chain), then neighbouring chains are added; of inner @ b, rows of b one after the other. Both by fma from 0. So a
// result depends on its own row of x alone.

constexpr int kChains = W == 16 ? 4 : 2;

// n values from i on, zeros behind.
template <Format F, bool IS_WHOLE>
INLINE vf load_values(const void* p, long i, long n) {
  if constexpr (IS_WHOLE) return load_any(p, F, i);
#if defined(MLXSERVE_AVX512)
  if constexpr (F == Format::float32) return load_first((const float*)p + i, n);
  __m256i h = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), (const uint16_t*)p + i);
  if constexpr (F == Format::float16) return _mm512_cvtph_ps(h);
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#else
  vf v = {};
  for (long j = 0; j < n; ++j) v[j] = load_scalar(p, F, i + j);
  return v;
#endif
}

template <bool IS_WHOLE>
INLINE void store_values(float* p, vf v, long n) {
  if constexpr (IS_WHOLE) store(p, v);
  else store_first(p, v, n);
}

// M rows of x times rows begin to end - 1 of `a`: n columns from `col` on.
template <Format F, int M, bool IS_WHOLE>
static void inner_block(const LowRank& m, const float* x, long begin, long end, long col, long n, float* y, long ld) {
  vf acc[M][kChains];
  for (int row = 0; row < M; ++row)
    for (int i = 0; i < kChains; ++i) acc[row][i] = (vf){};
  long k = begin;
  for (; k + kChains <= end; k += kChains)
#pragma GCC unroll 4
    for (int i = 0; i < kChains; ++i) {
      vf a = load_values<F, IS_WHOLE>(m.a, (k + i) * m.rank + col, n);
#pragma GCC unroll 4
      for (int row = 0; row < M; ++row) acc[row][i] = fma(splat(x[row * m.k + k + i]), a, acc[row][i]);
    }
  for (; k < end; ++k) {
    vf a = load_values<F, IS_WHOLE>(m.a, k * m.rank + col, n);
    for (int row = 0; row < M; ++row) acc[row][0] = fma(splat(x[row * m.k + k]), a, acc[row][0]);
  }
  for (int row = 0; row < M; ++row) {
    vf total = acc[row][0] + acc[row][1];
    if constexpr (kChains == 4) total = total + (acc[row][2] + acc[row][3]);
    store_values<IS_WHOLE>(y + row * ld + col, total, n);
  }
}

// Of b: `width` columns from `first` on.
struct Panel {
  const void* b;
  long first, width;
};

template <Format F>
INLINE Panel panel_of(const LowRank& m, long col) {
  const long first = col / m.panel * m.panel;
  return {(const char*)m.b + first * m.rank * (F == Format::float32 ? 4 : 2), first, least(m.panel, m.n - first)};
}

// M rows of y: n columns from `col` on, or C whole vectors of them; all of one panel.
template <Format F, int M, int C, bool IS_WHOLE>
static void change_block(const LowRank& m, const Panel& p, const float* inner, long inner_ld, float* y, long ld,
                         long col, long n) {
  vf acc[M][C];
  for (int row = 0; row < M; ++row)
    for (int c = 0; c < C; ++c) acc[row][c] = (vf){};
  for (long r = 0; r < m.rank; ++r) {
    vf b[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) b[c] = load_values<F, IS_WHOLE>(p.b, r * p.width + col - p.first + c * W, n);
#pragma GCC unroll 4
    for (int row = 0; row < M; ++row)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[row][c] = fma(splat(inner[row * inner_ld + r]), b[c], acc[row][c]);
  }
  for (int row = 0; row < M; ++row)
    for (int c = 0; c < C; ++c) {
      float* at = y + row * ld + col + c * W;
      vf old = IS_WHOLE ? load(at) : load_first(at, n);
      store_values<IS_WHOLE>(at, old + acc[row][c] * m.scale, n);
    }
}

template <Format F, int M>
static void inner_rows(const LowRank& m, const float* x, long begin, long end, float* y, long ld) {
  long col = 0;
  for (; col + W <= m.rank; col += W) inner_block<F, M, true>(m, x, begin, end, col, W, y, ld);
  if (col < m.rank) inner_block<F, M, false>(m, x, begin, end, col, m.rank - col, y, ld);
}

template <Format F, int M>
static void change_rows(const LowRank& m, const float* inner, long inner_ld, float* y, long ld, long begin, long end) {
  constexpr int C = M == 1 ? 4 : 2;
  for (long col = begin, stop; col < end; col = stop) {
    const Panel p = panel_of<F>(m, col);
    stop = least(end, p.first + p.width);
    for (; col + C * W <= stop; col += C * W) change_block<F, M, C, true>(m, p, inner, inner_ld, y, ld, col, W);
    for (; col + W <= stop; col += W) change_block<F, M, 1, true>(m, p, inner, inner_ld, y, ld, col, W);
    if (col < stop) change_block<F, M, 1, false>(m, p, inner, inner_ld, y, ld, col, stop - col);
  }
}

// Calls body.operator()<F, M>(row) for blocks of M rows that cover `rows`.
template <class Body>
INLINE void for_row_blocks(Format format, long rows, Body&& body) {
  auto all = [&]<Format F>() INLINE_LAMBDA {
    long row = 0;
    for (; row + 4 <= rows; row += 4) body.template operator()<F, 4>(row);
    if (rows - row == 3) body.template operator()<F, 3>(row);
    else if (rows - row == 2) body.template operator()<F, 2>(row);
    else if (rows - row == 1) body.template operator()<F, 1>(row);
  };
  if (format == Format::float32) return all.template operator()<Format::float32>();
  if (format == Format::float16) return all.template operator()<Format::float16>();
  all.template operator()<Format::bfloat16>();
}

static void low_rank_inner(const LowRank& m, const float* x, long rows, long begin, long end, float* y, long ld) {
  for_row_blocks(m.format, rows, [&]<Format F, int M>(long row) {
    inner_rows<F, M>(m, x + row * m.k, begin, end, y + row * ld, ld);
  });
}

static void low_rank_change(const LowRank& m, const float* inner, long inner_ld, const MatmulTile& t) {
  for_row_blocks(m.format, t.row_end - t.row_begin, [&]<Format F, int M>(long row) {
    change_rows<F, M>(m, inner + row * inner_ld, inner_ld, t.y + (t.row_begin + row) * t.ld, t.ld, t.col_begin,
                      t.col_end);
  });
}
