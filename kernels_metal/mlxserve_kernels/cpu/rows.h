// Work on single rows. Included by isa.cpp alone (see vec.h).

INLINE vf load_weight(const void* p, Format format, long i) {
  if (format == Format::float32) return load((const float*)p + i);
  return format == Format::float16 ? load_half((const uint16_t*)p + i) : load_bfloat((const uint16_t*)p + i);
}

static void rms_norm(const float* x, const void* weight, Format format, float eps, long rows, long k, float* y) {
  for (long row = 0; row < rows; ++row, x += k, y += k) {
    vf a = {}, b = {}, c = {}, d = {};
    long i = 0;
    for (; i + 4 * W <= k; i += 4 * W) {
      vf xa = load(x + i), xb = load(x + i + W), xc = load(x + i + 2 * W), xd = load(x + i + 3 * W);
      a = fma(xa, xa, a), b = fma(xb, xb, b), c = fma(xc, xc, c), d = fma(xd, xd, d);
    }
    float squares = sum((a + b) + (c + d));
    for (long j = i; j < k; ++j) squares += x[j] * x[j];
    float factor = 1.0f / __builtin_sqrtf(squares / (float)k + eps);
    long j = 0;
    for (; j + W <= k; j += W) {
      vf v = load(x + j) * factor;
      store(y + j, weight ? v * load_weight(weight, format, j) : v);
    }
    for (; j < k; ++j) y[j] = x[j] * factor * (weight ? load_scalar(weight, format, j) : 1.0f);
  }
}

INLINE vf silu_times(vf g, vf u) {
  vf e = exp_negative(g < (vf){} ? g : -g);  // e ** -|g|
  vf sigmoid = (g < (vf){} ? e : splat(1.0f)) / (1.0f + e);
  return g * sigmoid * u;
}

static void silu_mul(const float* gate, const float* up, float* y, long begin, long end) {
  long i = begin;
  for (; i + W <= end; i += W) store(y + i, silu_times(load(gate + i), load(up + i)));
  if (i < end) store_first(y + i, silu_times(load_first(gate + i, end - i), load_first(up + i, end - i)), end - i);
}
