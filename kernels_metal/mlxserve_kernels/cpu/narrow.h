// Rows of float16, bfloat16 and float32, to floats and back, rounded to the nearest, ties to even. Included by
// isa.cpp alone, behind vec.h.

INLINE vf load_any(const void* p, Format format, long i) {
  if (format == Format::float32) return load((const float*)p + i);
  return format == Format::float16 ? load_half((const uint16_t*)p + i) : load_bfloat((const uint16_t*)p + i);
}

[[maybe_unused]] static void widen(Format format, const void* from, long n, float* to) {
  long i = 0;
  for (; i + W <= n; i += W) store(to + i, load_any(from, format, i));
  for (; i < n; ++i) to[i] = load_scalar(from, format, i);
}

INLINE uint16_t bfloat_of(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  return (uint16_t)(f != f ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t half_of(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x47800000) return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) {
    // Beside 0.5 a float has the units of the smallest halves, so the sum rounds as they do.
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    __builtin_memcpy(&bits, &magnitude, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
  }
  // Rounding up past the largest half carries into infinity's exponent.
  return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

typedef uint32_t vu __attribute__((vector_size(sizeof(vf)), may_alias));
typedef uint16_t vh __attribute__((vector_size(sizeof(vf) / 2), may_alias));

INLINE void store_bfloat(uint16_t* to, vf v) {
  vu bits = (vu)v;
  bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  vu is_nan = (vu)(v != v);
  vh rounded = __builtin_convertvector((bits & ~is_nan) | (is_nan & 0x7fc0), vh);
  __builtin_memcpy(to, &rounded, sizeof rounded);
}

INLINE void store_half(uint16_t* to, vf v) {
#if defined(MLXSERVE_AVX512)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(MLXSERVE_AVX2)
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < W; ++i) to[i] = half_of(v[i]);
#endif
}

[[maybe_unused]] static void narrow(Format format, const float* from, long n, void* to) {
  long i = 0;
  if (format == Format::float32) {
    for (; i + W <= n; i += W) store((float*)to + i, load(from + i));
    for (; i < n; ++i) ((float*)to)[i] = from[i];
  } else if (format == Format::float16) {
    for (; i + W <= n; i += W) store_half((uint16_t*)to + i, load(from + i));
    for (; i < n; ++i) ((uint16_t*)to)[i] = half_of(from[i]);
  } else {
    for (; i + W <= n; i += W) store_bfloat((uint16_t*)to + i, load(from + i));
    for (; i < n; ++i) ((uint16_t*)to)[i] = bfloat_of(from[i]);
  }
}
