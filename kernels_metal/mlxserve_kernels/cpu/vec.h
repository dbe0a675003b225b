// One vector type for each instruction set. Included by isa.cpp alone, inside the namespace of that set, so
// that nothing compiled with wider instructions is ever shared with another set.
// No expression is contracted (-ffp-contract=off): what is fused says fma.

#if defined(MLXSERVE_AVX512)
using vf = __m512;
constexpr int W = 16;
#elif defined(MLXSERVE_AVX2)
using vf = __m256;
constexpr int W = 8;
#else
typedef float vf __attribute__((vector_size(16), aligned(16), may_alias));
constexpr int W = 4;
#endif
typedef int vi __attribute__((vector_size(sizeof(vf)), may_alias));
typedef float vf_unaligned __attribute__((vector_size(sizeof(vf)), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

INLINE constexpr long least(long a, long b) { return a < b ? a : b; }
INLINE constexpr long most(long a, long b) { return a > b ? a : b; }
INLINE constexpr long ceil_div(long a, long b) { return (a + b - 1) / b; }

INLINE vf load(const float* p) { return (vf) * (const vf_unaligned*)p; }
INLINE void store(float* p, vf v) { *(vf_unaligned*)p = (vf_unaligned)v; }
INLINE vf splat(float x) { return x - (vf){}; }

INLINE vf to_floats(vi q) { return __builtin_convertvector(q, vf); }

INLINE vf fma(vf a, vf b, vf c) {
#if defined(MLXSERVE_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(MLXSERVE_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The first n lanes from memory, zeros behind.
INLINE vf load_first(const float* p, long n) {
#if defined(MLXSERVE_AVX512)
  return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
  vf v = {};
  for (long i = 0; i < n; ++i) v[i] = p[i];
  return v;
#endif
}

INLINE void store_first(float* p, vf v, long n) {
#if defined(MLXSERVE_AVX512)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v);
#else
  for (long i = 0; i < n; ++i) p[i] = v[i];
#endif
}

// Sums of four vectors, always in one order: halves are added until four lanes are left, then lanes l and
// l + 2, then the last two.
INLINE v4 fold(vf v) {
#if defined(MLXSERVE_AVX512)
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return (v4)_mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
#elif defined(MLXSERVE_AVX2)
  return (v4)_mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
#else
  return (v4)v;
#endif
}

INLINE v4 sum4(vf a, vf b, vf c, vf d) {
  v4 fa = fold(a), fb = fold(b), fc = fold(c), fd = fold(d);
  typedef int i4 __attribute__((vector_size(16)));
  v4 ab = __builtin_shuffle(fa, fb, (i4){0, 4, 1, 5}) + __builtin_shuffle(fa, fb, (i4){2, 6, 3, 7});
  v4 cd = __builtin_shuffle(fc, fd, (i4){0, 4, 1, 5}) + __builtin_shuffle(fc, fd, (i4){2, 6, 3, 7});
  return __builtin_shuffle(ab, cd, (i4){0, 1, 4, 5}) + __builtin_shuffle(ab, cd, (i4){2, 3, 6, 7});
}

INLINE float sum(vf a) {
  v4 f = fold(a);
  return (f[0] + f[2]) + (f[1] + f[3]);
}

// Every other lane of two vectors in a row, from the first or the second on.
INLINE vf evens(vf a, vf b) {
  vi from;
  for (int l = 0; l < W; ++l) from[l] = 2 * l;
  return (vf)__builtin_shuffle((vi)a, (vi)b, from);
}
INLINE vf odds(vf a, vf b) {
  vi from;
  for (int l = 0; l < W; ++l) from[l] = 2 * l + 1;
  return (vf)__builtin_shuffle((vi)a, (vi)b, from);
}

INLINE vf greater(vf a, vf b) { return a > b ? a : b; }

INLINE float greatest(vf v) {
#if defined(MLXSERVE_AVX512)
  return _mm512_reduce_max_ps(v);
#else
  float m = v[0];
  for (int i = 1; i < W; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// e ** x for x <= 0, within about 1 ulp; 0 below -87.3, NaN stays NaN. Taylor's series of degree 7 after the
// reduction to |r| <= ln(2) / 2.
INLINE vf exp_negative(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2 ** 23: adding it rounds to an integer
  const vf floor = splat(-87.3f);
  vf c = x < floor ? floor : x;
  vf shifted = fma(c, splat(1.44269504f), magic);
  vf n = shifted - magic;
  vf r = fma(n, splat(-0.693359375f), c);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  vi exponent = (vi)shifted - (vi)magic;
  vf y = p * (vf)((exponent + 127) << 23);
  y = x < floor ? (vf){} : y;
  return x != x ? x : y;
}

INLINE float exp_negative(float x) { return exp_negative(splat(x))[0]; }

// tanh; a series of odd powers near 0, where 1 - e ** (-2 |x|) would cancel.
INLINE vf tanh_of(vf x) {
  vf a = x < (vf){} ? -x : x;
  vf e = exp_negative(-2.0f * a);
  vf big = (1.0f - e) / (1.0f + e);
  vf s = x * x;
  vf p = splat(-1382.0f / 155925);
  p = fma(p, s, splat(62.0f / 2835));
  p = fma(p, s, splat(-17.0f / 315));
  p = fma(p, s, splat(2.0f / 15));
  p = fma(p, s, splat(-1.0f / 3));
  vf small = fma(p * s, x, x);
  return a < splat(0.3f) ? small : (x < (vf){} ? -big : big);
}

INLINE float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = (uint32_t)(h & 0x7fff) << 13;
  uint32_t bits = (h & 0x7c00) == 0x7c00 ? (magnitude + 0x70000000u) : magnitude;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  f = (h & 0x7c00) == 0x7c00 ? f : f * 0x1p112f;
  __builtin_memcpy(&bits, &f, 4);
  bits |= sign;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

INLINE float bfloat_to_float(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

INLINE float load_scalar(const void* p, Format format, long i) {
  if (format == Format::float32) return ((const float*)p)[i];
  uint16_t h = ((const uint16_t*)p)[i];
  return format == Format::float16 ? half_to_float(h) : bfloat_to_float(h);
}

INLINE vf load_half(const uint16_t* p) {
#if defined(MLXSERVE_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(MLXSERVE_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  return (vf){half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
#endif
}

INLINE vf load_bfloat(const uint16_t* p) {
#if defined(MLXSERVE_AVX512)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(MLXSERVE_AVX2)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  return (vf){bfloat_to_float(p[0]), bfloat_to_float(p[1]), bfloat_to_float(p[2]), bfloat_to_float(p[3])};
#endif
}

// The first n <= 16 values of an array, as float32.
template <Format F>
INLINE void widen_first(const void* from, long n, float* to) {
  if constexpr (F == Format::float32) {
    const float* floats = (const float*)from;
    for (long i = 0; i < n; i += W) store(to + i, n - i < W ? load_first(floats + i, n - i) : load(floats + i));
    return;
  }
#if defined(MLXSERVE_AVX512)
  __m256i h = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), from);
  store(to, F == Format::float16 ? _mm512_cvtph_ps(h)
                                 : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)));
#else
  long i = 0;
  for (; i + W <= n; i += W)
    store(to + i, F == Format::float16 ? load_half((const uint16_t*)from + i) : load_bfloat((const uint16_t*)from + i));
  for (; i < n; ++i) to[i] = load_scalar(from, F, i);
#endif
}
