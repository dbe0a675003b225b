// Quantized keys and values as float32. Included by isa.cpp alone (see vec.h). What the bytes mean: kv_layout.h.
// A product and a sum are two roundings, never an fma: the values are the same on every instruction set.

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


// The W keys of a page's head from row `at` on: vector d goes to to + d * stride.
static void widen_keys(Format format, const uint8_t* head, long page, long dim, long at, float* to, long stride) {
  const long groups = dim / kKvGroup;
  const float* scales = (const float*)(head + page * kv_row_integers(format, dim)) + at;
  const uint8_t* from = head + at;
  for (long g = 0; g < groups; ++g, to += kKvGroup * stride) {
    vf scale = load(scales + g * page);
    if (format == Format::kv8) {
      for (long i = 0; i < kKvGroup; ++i, from += page) store(to + i * stride, to_floats(load_signed(from)) * scale);
    } else {
      vf bias = load(scales + (groups + g) * page);
      for (long i = 0; i < kKvGroup / 2; ++i, from += page) {
        vi pairs = load_unsigned(from);
        store(to + i * stride, to_floats(pairs & 15) * scale + bias);
        store(to + (kKvGroup / 2 + i) * stride, to_floats(pairs >> 4) * scale + bias);
      }
    }
  }
}

// Row `at` of the values of a page's head.
INLINE void widen_value(Format format, const uint8_t* head, long page, long dim, long at, float* to) {
  const long groups = dim / kKvGroup, integers = kv_row_integers(format, dim);
  const float* scales = (const float*)(head + page * integers) + at * groups;
  const uint8_t* from = head + at * integers;
  for (long g = 0; g < groups; ++g, to += kKvGroup) {
    vf scale = splat(scales[g]);
    if (format == Format::kv8) {
      for (long i = 0; i < kKvGroup; i += W, from += W) store(to + i, to_floats(load_signed(from)) * scale);
    } else {
      vf bias = splat(scales[page * groups + g]);
      for (long i = 0; i < kKvGroup / 2; i += W, from += W) {
        vi pairs = load_unsigned(from);
        store(to + i, to_floats(pairs & 15) * scale + bias);
        store(to + kKvGroup / 2 + i, to_floats(pairs >> 4) * scale + bias);
      }
    }
  }
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
