// Work on single rows. Included by isa.cpp alone (see vec.h).

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
      store(y + j, weight ? v * load_any(weight, format, j) : v);
    }
    for (; j < k; ++j) y[j] = x[j] * factor * (weight ? load_scalar(weight, format, j) : 1.0f);
  }
}

INLINE vf silu_times(vf g, vf u) {
  vf e = exp_negative(g < (vf){} ? g : -g);  // e ** -|g|
  vf sigmoid = (g < (vf){} ? e : splat(1.0f)) / (1.0f + e);
  return g * sigmoid * u;
}

// The tanh form of gelu, as nn.gelu_approx has it.
INLINE vf gelu_times(vf g, vf u) {
  vf inner = 0.7978845608f * (g + 0.044715f * (g * g * g));
  return 0.5f * g * (1.0f + tanh_of(inner)) * u;
}

// gelu itself: g times the share of a normal distribution below g, which is half of erfc(-g / sqrt(2)). For t >= 0
// erfc(t) is e ** -t ** 2 times a polynomial of (t - 2) / (t + 2), fitted to 4e-8, so small shares are exact too.
INLINE vf gelu_erf_times(vf g, vf u) {
  vf t = (g < (vf){} ? -g : g) * 0.7071067812f;
  vf v = (t - 2.0f) / (t + 2.0f);
  vf p = splat(1.073360588e-4f);
  p = fma(p, v, splat(6.248014115e-5f));
  p = fma(p, v, splat(-9.276593070e-4f));
  p = fma(p, v, splat(-8.542597669e-4f));
  p = fma(p, v, splat(6.979037437e-3f));
  p = fma(p, v, splat(3.734768385e-3f));
  p = fma(p, v, splat(-7.897611814e-2f));
  p = fma(p, v, splat(0.2416579599f));
  p = fma(p, v, splat(-0.4271859336f));
  p = fma(p, v, splat(0.2553956811f));
  vf half = 0.5f * g, s = half * g, rest = fma(half, g, -s);  // t ** 2, and what its rounding took
  vf tail = 0.5f * p * exp_negative(-s) * (1.0f - rest);
  tail = t < splat(9.3f) ? tail : g != g ? g : (vf){};
  return g * (g < (vf){} ? tail : 1.0f - tail) * u;
}

template <vf (*F)(vf, vf)>
INLINE void activate_all(float* gate, const float* up, long n) {
  long i = 0;
  for (; i + W <= n; i += W) store(gate + i, F(load(gate + i), load(up + i)));
  if (i < n) store_first(gate + i, F(load_first(gate + i, n - i), load_first(up + i, n - i)), n - i);
}

static void activate(Activation f, float* gate, const float* up, long n) {
  if (f == Activation::silu) return activate_all<silu_times>(gate, up, n);
  if (f == Activation::gelu) return activate_all<gelu_erf_times>(gate, up, n);
  activate_all<gelu_times>(gate, up, n);
}

static void add_scaled(float* y, const float* x, float factor, long n) {
  long i = 0;
  for (; i + W <= n; i += W) store(y + i, load(y + i) + load(x + i) * factor);
  for (; i < n; ++i) y[i] += x[i] * factor;
}

static void rotate(float* x, long heads, long dim, const float* angles, long half, bool is_interleaved, float factor) {
  const float *cosines = angles, *sines = angles + half;
  for (long head = 0; head < heads; ++head, x += dim) {
    if (is_interleaved) {
      for (long i = 0; i < half; ++i) {
        float a = x[2 * i] * factor, b = x[2 * i + 1] * factor;
        x[2 * i] = a * cosines[i] - b * sines[i];
        x[2 * i + 1] = a * sines[i] + b * cosines[i];
      }
      continue;
    }
    long i = 0;
    for (; i + W <= half; i += W) {
      vf a = load(x + i) * factor, b = load(x + half + i) * factor, c = load(cosines + i), s = load(sines + i);
      store(x + i, a * c - b * s);
      store(x + half + i, a * s + b * c);
    }
    for (; i < half; ++i) {
      float a = x[i] * factor, b = x[half + i] * factor;
      x[i] = a * cosines[i] - b * sines[i];
      x[half + i] = a * sines[i] + b * cosines[i];
    }
  }
}

static long argmax(const float* x, long n) {
  vf top = splat(-__builtin_inff());
  vi strange = {};
  long i = 0;
  for (; i + W <= n; i += W) {
    vf v = load(x + i);
    strange |= v != v;
    top = greater(v, top);
  }
  float largest = greatest(top);
  bool is_strange = false;
  for (int l = 0; l < W; ++l) is_strange |= strange[l] != 0;
  for (; i < n; ++i) {
    is_strange |= x[i] != x[i];
    largest = x[i] > largest ? x[i] : largest;
  }
  if (is_strange) return -1;
  for (i = 0; i + W <= n; i += W) {
    vi equal = load(x + i) == largest;
    bool any = false;
    for (int l = 0; l < W; ++l) any |= equal[l] != 0;
    if (any) break;
  }
  while (i < n - 1 && x[i] != largest) ++i;
  return i;
}
