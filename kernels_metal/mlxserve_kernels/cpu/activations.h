// Activations and their slopes. Included by isa.cpp and training_isa.cpp alone, behind vec.h.

INLINE vf sigmoid_of(vf g) {
  vf e = exp_negative(g < (vf){} ? g : -g);  // e ** -|g|
  return (g < (vf){} ? e : splat(1.0f)) / (1.0f + e);
}

INLINE vf silu_times(vf g, vf u) { return g * sigmoid_of(g) * u; }

INLINE vf silu_slope(vf g) {
  vf sigmoid = sigmoid_of(g);
  return sigmoid * (1.0f + g * (1.0f - sigmoid));
}

// The tanh form of gelu, as nn.gelu_approx has it.
INLINE vf gelu_tanh_of(vf g) {
  vf inner = 0.7978845608f * (g + 0.044715f * (g * g * g));
  return tanh_of(inner);
}

INLINE vf gelu_times(vf g, vf u) { return 0.5f * g * (1.0f + gelu_tanh_of(g)) * u; }

INLINE vf gelu_slope(vf g) {
  vf t = gelu_tanh_of(g);
  vf inner = 0.7978845608f * (1.0f + 0.134145f * (g * g));
  return 0.5f * (1.0f + t + g * (1.0f - t * t) * inner);
}

// The share of a normal distribution below g, which is half of erfc(-g / sqrt(2)). For t >= 0 erfc(t) is
// e ** -t ** 2 times a polynomial of (t - 2) / (t + 2), fitted to 4e-8, so small shares are exact too.
INLINE vf normal_share(vf g) {
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
  return g < (vf){} ? tail : 1.0f - tail;
}

// gelu itself: g times that share.
INLINE vf gelu_erf_times(vf g, vf u) { return g * normal_share(g) * u; }

INLINE vf gelu_erf_slope(vf g) {
  vf density = 0.3989422804f * exp_negative(-0.5f * (g * g));
  return normal_share(g) + g * density;
}
