// Products of small matrices. Included by training_isa.cpp alone, behind vec.h.

// M rows of V vectors.
template <int M, int V>
INLINE void product_tile(const BlockProduct& p, const float* a, const float* b, float* c) {
  vf acc[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[m][v] = p.is_added ? load(c + m * p.c_row + v * W) : (vf){};
  for (long k = 0; k < p.k; ++k, a += p.a_column, b += p.b_row) {
    vf row[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) row[v] = load(b + v * W);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      vf factor = splat(a[m * p.a_row]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[m][v] = fma(row[v], factor, acc[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + m * p.c_row + v * W, acc[m][v]);
}

template <int V>
static void product_columns(const BlockProduct& p, long column) {
  constexpr int M = 6;
  long m = 0;
  auto rows = [&]<int N>() INLINE_LAMBDA {
    product_tile<N, V>(p, p.a + m * p.a_row, p.b + column, p.c + m * p.c_row + column);
  };
  for (; m + M <= p.m; m += M) rows.template operator()<M>();
  switch (p.m - m) {
    case 1: return rows.template operator()<1>();
    case 2: return rows.template operator()<2>();
    case 3: return rows.template operator()<3>();
    case 4: return rows.template operator()<4>();
    case 5: return rows.template operator()<5>();
  }
}

static void multiply_blocks(const BlockProduct& p) {
  constexpr int V = W == 16 ? 4 : 2;
  long column = 0;
  for (; column + V * W <= p.n; column += V * W) product_columns<V>(p, column);
  if constexpr (V == 4)
    for (; column + 2 * W <= p.n; column += 2 * W) product_columns<2>(p, column);
  for (; column < p.n; column += W) product_columns<1>(p, column);
}
