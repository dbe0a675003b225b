// What gates do to a value, as mlx.nn has it.

enum Activation { silu, gelu_tanh, gelu };

// Abramowitz and Stegun 7.1.26: within 1.5e-7 of the true value.
inline float erf_of(float z) {
  const float x = metal::fabs(z), t = 1 / (1 + 0.3275911f * x);
  float sum = 1.061405429f;
  sum = fma(sum, t, -1.453152027f);
  sum = fma(sum, t, 1.421413741f);
  sum = fma(sum, t, -0.284496736f);
  sum = fma(sum, t, 0.254829592f);
  const float magnitude = 1 - sum * t * metal::precise::exp(-x * x);
  return z < 0 ? -magnitude : magnitude;
}

template <int A>
float activated(float z) {
  if constexpr (A == silu) return z / (1 + metal::precise::exp(-z));
  if constexpr (A == gelu) return 0.5f * z * (1 + erf_of(z * 0.7071067811865475f));
  const float inner = 0.7978845608028654f * (z + 0.044715f * z * z * z);
  return 0.5f * z * (1 + metal::precise::tanh(inner));
}
