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
