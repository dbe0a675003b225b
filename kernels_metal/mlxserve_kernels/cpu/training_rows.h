// Gradients row by row, and the softmax over a vocabulary. Included by training_isa.cpp alone, behind activations.h.

// Calls body(i, n) for vectors of n values; n is W but for the last.
template <class Body>
INLINE void for_vectors(long size, Body&& body) {
  long i = 0;
  for (; i + W <= size; i += W) body(i, W);
  if (i < size) body(i, size - i);
}
INLINE vf load_some(const float* p, long n) { return n == W ? load(p) : load_first(p, n); }
INLINE void store_some(float* p, vf v, long n) {
  if (n == W) store(p, v);
  else store_first(p, v, n);
}

static void rms_norm_gradient(const float* x, const float* weight, const float* d_y, const float* d_sum, float eps,
                              long rows, long k, float* d_x, float* d_weight) {
  for (long row = 0; row < rows; ++row, x += k, d_y += k, d_x += k) {
    vf squares = {}, products = {};
    for_vectors(k, [&](long i, long n) INLINE_LAMBDA {
      vf v = load_some(x + i, n), g = load_some(d_y + i, n);
      if (weight) g = g * load_some(weight + i, n);
      squares = fma(v, v, squares), products = fma(v, g, products);
    });
    const float factor = 1.0f / __builtin_sqrtf(sum(squares) / (float)k + eps);
    const float along = factor * factor * factor * (sum(products) / (float)k);
    for_vectors(k, [&](long i, long n) INLINE_LAMBDA {
      vf v = load_some(x + i, n), g = load_some(d_y + i, n);
      if (d_weight) store_some(d_weight + i, fma(g, v * factor, load_some(d_weight + i, n)), n);
      if (weight) g = g * load_some(weight + i, n);
      vf d = g * factor - v * along;
      if (d_sum) d = d + load_some(d_sum + i, n);
      store_some(d_x + i, d, n);
    });
    if (d_sum) d_sum += k;
  }
}

template <vf (*TIMES)(vf, vf), vf (*SLOPE)(vf)>
INLINE void gated_gradient_of(const float* gate, const float* up, const float* d_y, long size, float* d_gate,
                              float* d_up) {
  for_vectors(size, [&](long i, long n) INLINE_LAMBDA {
    vf g = load_some(gate + i, n), u = load_some(up + i, n), d = load_some(d_y + i, n);
    store_some(d_gate + i, d * u * SLOPE(g), n);
    store_some(d_up + i, TIMES(g, d), n);
  });
}

static void gated_gradient(Activation f, const float* gate, const float* up, const float* d_y, long n, float* d_gate,
                           float* d_up) {
  if (f == Activation::silu) return gated_gradient_of<silu_times, silu_slope>(gate, up, d_y, n, d_gate, d_up);
  if (f == Activation::gelu) return gated_gradient_of<gelu_erf_times, gelu_erf_slope>(gate, up, d_y, n, d_gate, d_up);
  gated_gradient_of<gelu_times, gelu_slope>(gate, up, d_y, n, d_gate, d_up);
}

// A logit of a product; `bent` is the tanh of a capped one.
INLINE vf logit_of(const LogitShape& shape, vf product, vf& bent) {
  vf logit = product * shape.scale;
  if (shape.softcap == 0) return logit;
  bent = tanh_of(logit / shape.softcap);
  return bent * shape.softcap;
}
INLINE vf logit_slope(const LogitShape& shape, vf bent) {
  if (shape.softcap == 0) return splat(shape.scale);
  return (1.0f - bent * bent) * shape.scale;
}

static float take_logits(const LogitShape& shape, float* products, long size, float& top, double& total) {
  vf largest = splat(-__builtin_inff());
  for_vectors(size, [&](long i, long n) INLINE_LAMBDA {
    vf bent = {}, logit = logit_of(shape, load_some(products + i, n), bent);
    if (n < W)
      for (long l = n; l < W; ++l) logit[l] = largest[0];
    largest = logit > largest || logit != logit ? logit : largest;
  });
  float now = top;
  for (int l = 0; l < W; ++l) now = largest[l] > now || largest[l] != largest[l] ? largest[l] : now;
  const float factor = now == top ? 1.0f : exp_negative(top - now);
  vf sums = {};
  for_vectors(size, [&](long i, long n) INLINE_LAMBDA {
    vf bent = {}, logit = logit_of(shape, load_some(products + i, n), bent);
    vf share = exp_negative(logit - now);
    if (n < W)
      for (long l = n; l < W; ++l) share[l] = 0;
    sums = sums + share;
    store_some(products + i, share * logit_slope(shape, bent), n);
  });
  top = now;
  total = total * factor + sum(sums);
  return factor;
}

static void logit_gradient(const LogitShape& shape, float* products, long size, float log_sum, long target,
                           float weight) {
  float at_target = 0;
  if (target >= 0) {
    vf bent = {};
    logit_of(shape, splat(products[target]), bent);
    at_target = weight * logit_slope(shape, bent)[0];
  }
  for_vectors(size, [&](long i, long n) INLINE_LAMBDA {
    vf bent = {}, logit = logit_of(shape, load_some(products + i, n), bent), x = logit - log_sum;
    vf share = exp_negative(x > (vf){} ? (vf){} : x);
    store_some(products + i, share * logit_slope(shape, bent) * weight, n);
  });
  if (target >= 0) products[target] -= at_target;
}
