// Quantized keys and values: vectors of bytes, and how to ask for pages. Included by isa.cpp alone (see vec.h). What
// the bytes mean: kv_layout.h.

INLINE vi load_signed(const uint8_t* p) {
#if defined(MLXSERVE_AVX512)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(MLXSERVE_AVX2)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return (vi){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]};
#endif
}

INLINE vi load_unsigned(const uint8_t* p) {
#if defined(MLXSERVE_AVX512)
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(MLXSERVE_AVX2)
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return (vi){p[0], p[1], p[2], p[3]};
#endif
}

INLINE void prefetch_bytes(const void* from, long bytes) {
  for (long i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)from + i, 0, 2);
}

// Rows `at` to at + count - 1 of a page's head, of keys (is_transposed) or values.
INLINE void prefetch_head(Format format, const uint8_t* head, long page, long dim, long at, long count,
                          bool is_transposed) {
  if (count == page) return prefetch_bytes(head, page * kv_row_bytes(format, dim));
  const long integers = kv_row_integers(format, dim), scales = (kv_row_bytes(format, dim) - integers) / 4;
  const float* floats = (const float*)(head + page * integers);
  if (is_transposed) {
    for (long i = 0; i < integers; ++i) prefetch_bytes(head + i * page + at, count);
    for (long i = 0; i < scales; ++i) prefetch_bytes(floats + i * page + at, count * 4);
  } else {
    prefetch_bytes(head + at * integers, count * integers);
    for (long i = 0; i < scales; i += dim / kKvGroup)
      prefetch_bytes(floats + i * page + at * (dim / kKvGroup), count * (dim / kKvGroup) * 4);
  }
}
