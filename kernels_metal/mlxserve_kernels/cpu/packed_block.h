// Scores and sums straight from a quantized block, for items of one tile of rows: what is read by one tile alone is
// not worth storing as floats. Included by attention.h alone. The same steps in the same order as on widened blocks.

template <Format F>
INLINE vf packed_vector(const uint8_t* from, int half, vf scale, const float* bias) {
  if constexpr (F == Format::kv8) return to_floats(load_signed(from)) * scale;
  else return to_floats((load_unsigned(from) >> (4 * half)) & 15) * scale + load(bias);
}

template <Format F, int R>
static void packed_scores(const float* q, const Block& block, long page, long dim, float* scores) {
  constexpr int halves = F == Format::kv8 ? 1 : 2;
  constexpr long integers = kKvGroup / halves;
  const long groups = dim / kKvGroup;
  Ahead ahead = block.ahead_keys;
  for (long j = 0; j < KB; j += AV * W) {
    const PackedRow* key = block.packed_key + j / W;
    vf acc[R][AV];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < AV; ++v) acc[r][v] = (vf){};
    const float* x = q;
    for (long g = 0; g < groups; ++g) {
      vf scale[AV];
      for (int v = 0; v < AV; ++v) scale[v] = load(key[v].scales + g * page);
      for (int half = 0; half < halves; ++half)
        for (long i = g * integers; i < (g + 1) * integers; ++i, x += R) {
          ahead.ask();
          vf k[AV];
          for (int v = 0; v < AV; ++v)
            k[v] = packed_vector<F>(key[v].integers + i * page, half, scale[v], key[v].scales + (groups + g) * page);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            vf one = splat(x[r]);
#pragma GCC unroll 8
            for (int v = 0; v < AV; ++v) acc[r][v] = fma(one, k[v], acc[r][v]);
          }
        }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < AV; ++v) store(scores + r * KB + j + v * W, acc[r][v]);
  }
}

// `width` is the dimension of the values.
template <Format F, int R>
static void add_packed_values(const Block& block, long page, const float* weights, long from, long to,
                              const float* factors, float* values, long width) {
  Ahead ahead = block.ahead_values;
  for (long i = 0; i < width; i += AV * W) {
    vf acc[R][AV];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < AV; ++v) acc[r][v] = load(values + r * width + i + v * W) * factors[r];
    for (long j = from; j < to; ++j) {
      const PackedRow& row = block.packed_value[j];
      ahead.ask();
      vf x[AV];
      for (int v = 0; v < AV; ++v) {
        const long at = i + v * W, group = at / kKvGroup;
        vf scale = splat(row.scales[group]);
        if constexpr (F == Format::kv8) {
          x[v] = to_floats(load_signed(row.integers + at)) * scale;
        } else {
          vi pairs = load_unsigned(row.integers + group * (kKvGroup / 2) + at % (kKvGroup / 2));
          vi q = (pairs >> (int)(at % kKvGroup / (kKvGroup / 2) * 4)) & 15;
          x[v] = to_floats(q) * scale + splat(row.scales[page * (width / kKvGroup) + group]);
        }
      }
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
