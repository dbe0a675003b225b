// Readers of the weight formats that have no reader of their own in matmul.h, with the same interface.
// Included by isa.cpp alone, behind vec.h, from matmul.h.

// Values of BITS bits in a row of bytes, the first one in the lowest bits; they may straddle two bytes.
template <int BITS>
INLINE vi unpack(const uint8_t* row, long k) {
#if defined(MLXSERVE_AVX512)
  // The two bytes around each value go to its lane. Only the bytes of these 16 values are read.
  constexpr auto byte = [](int i) { return (i * BITS / 8) | ((i * BITS / 8 + 1) << 8); };
  constexpr auto bit = [](int i) { return i * BITS % 8; };
  const __m512i picks = _mm512_setr_epi32(byte(0), byte(1), byte(2), byte(3), byte(4), byte(5), byte(6), byte(7), byte(8),
                                          byte(9), byte(10), byte(11), byte(12), byte(13), byte(14), byte(15));
  const __m512i shifts = _mm512_setr_epi32(bit(0), bit(1), bit(2), bit(3), bit(4), bit(5), bit(6), bit(7), bit(8),
                                           bit(9), bit(10), bit(11), bit(12), bit(13), bit(14), bit(15));
  __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)((1u << 2 * BITS) - 1), row + k / 8 * BITS);
  __m512i pairs = _mm512_permutexvar_epi8(picks, _mm512_castsi128_si512(bytes));
  return (vi)_mm512_and_si512(_mm512_srlv_epi32(pairs, shifts), _mm512_set1_epi32((1 << BITS) - 1));
#elif defined(MLXSERVE_AVX2)
  constexpr auto byte = [](int i) { return (i * BITS / 8) | ((i * BITS / 8 + 1) << 8) | (int)0x80800000; };
  constexpr auto bit = [](int i) { return i * BITS % 8; };
  const __m256i picks =
      _mm256_setr_epi32(byte(0), byte(1), byte(2), byte(3), byte(4), byte(5), byte(6), byte(7));
  const __m256i shifts = _mm256_setr_epi32(bit(0), bit(1), bit(2), bit(3), bit(4), bit(5), bit(6), bit(7));
  long long bytes = 0;
  __builtin_memcpy(&bytes, row + k / 8 * BITS, BITS);
  __m256i pairs = _mm256_shuffle_epi8(_mm256_set1_epi64x(bytes), picks);
  return (vi)_mm256_and_si256(_mm256_srlv_epi32(pairs, shifts), _mm256_set1_epi32((1 << BITS) - 1));
#else
  uint64_t bytes = 0;
  __builtin_memcpy(&bytes, row + k / 8 * BITS, BITS);
  vi q;
  for (int i = 0; i < W; ++i) q[i] = (int)(bytes >> (k % 8 + i) * BITS) & ((1 << BITS) - 1);
  return q;
#endif
}


// The share of the chunk at k of `count` rows of `size` bytes, `ahead` rows on.
INLINE void prefetch_rows(const uint8_t* row, long size, long begin, long length, long ahead, long count) {
  const uint8_t* at = row + ahead * size + begin * count;
  for (long i = 0; i < length * count; i += 64) __builtin_prefetch(at + i);
}

template <int BITS, Format S>
struct ReadAffine {
  const uint8_t* bytes;
  ReadScales<S> scales;
  vf scale, bias;

  INLINE_MEMBER void open(const Weight& w, long n) {
    bytes = (const uint8_t*)w.data + n * (w.k / 8 * BITS);
    scales.open(w, n);
  }
  INLINE_MEMBER void prefetch(const Weight& w, long k, long ahead, long count) const {
    prefetch_rows(bytes, w.k / 8 * BITS, k / 8 * BITS, CHUNK / 8 * BITS, ahead, count);
  }
  INLINE_MEMBER void widen(long g, long count) { scales.widen(g, count); }
  INLINE_MEMBER void prefetch_scales(const Weight& w, long g, long ahead, long count) const {
    scales.prefetch(w, g, ahead, count);
  }
  INLINE_MEMBER void group(unsigned i) { scale = scales.scale(i), bias = scales.bias(i); }
  INLINE_MEMBER vf vector(long k) const { return scale * to_floats(unpack<BITS>(bytes, k)) + bias; }
};

template <Format S>
using ReadAffine2 = ReadAffine<2, S>;
template <Format S>
using ReadAffine3 = ReadAffine<3, S>;
template <Format S>
using ReadAffine5 = ReadAffine<5, S>;
template <Format S>
using ReadAffine6 = ReadAffine<6, S>;

// 2 ** (e - 127); e = 255 is infinity, as mlx has it.
INLINE float e8m0_to_float(uint8_t e) {
  uint32_t bits = e ? (uint32_t)e << 23 : 0x400000;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

// A sign, 4 bits of exponent, 3 of mantissa: a float16's but for the exponent's bias. 127 is NaN.
INLINE uint16_t e4m3_to_half(uint8_t v) {
  return (uint16_t)((v & 127) == 127 ? 0x7e00 : (v & 127) << 7 | (v & 128) << 8);
}
INLINE float e4m3_to_float(uint8_t v) { return half_to_float(e4m3_to_half(v)) * 256; }

INLINE vf load_e4m3(const uint8_t* p) {
#if defined(MLXSERVE_AVX512)
  __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  __m256i magnitude = _mm256_and_si256(v, _mm256_set1_epi16(127));
  __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7),
                                 _mm256_slli_epi16(_mm256_and_si256(v, _mm256_set1_epi16(128)), 8));
  __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(127));
  return _mm512_cvtph_ps(_mm256_or_si256(half, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)))) * 256.0f;
#elif defined(MLXSERVE_AVX2)
  __m128i v = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
  __m128i magnitude = _mm_and_si128(v, _mm_set1_epi16(127));
  __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), _mm_slli_epi16(_mm_and_si128(v, _mm_set1_epi16(128)), 8));
  __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(127));
  return _mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00)))) * 256.0f;
#else
  return (vf){e4m3_to_float(p[0]), e4m3_to_float(p[1]), e4m3_to_float(p[2]), e4m3_to_float(p[3])};
#endif
}

// A sign, 2 bits of exponent, 1 of mantissa.
INLINE vf load_e2m1(const uint8_t* row, long k) {
#if defined(MLXSERVE_AVX512)
  const vf table = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  const __m512i picks = _mm512_set_epi64(0x3c00000038, 0x3400000030, 0x2c00000028, 0x2400000020,
                                         0x1c00000018, 0x1400000010, 0x0c00000008, 0x0400000000);
  long long both;
  __builtin_memcpy(&both, row + k / 2, 8);
  return _mm512_permutexvar_ps(_mm512_multishift_epi64_epi8(picks, _mm512_set1_epi64(both)), table);
#elif defined(MLXSERVE_AVX2)
  const vf table = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  int word;
  __builtin_memcpy(&word, row + k / 2, 4);
  __m256i q = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0));
  __m256i sign = _mm256_slli_epi32(_mm256_and_si256(q, _mm256_set1_epi32(8)), 28);
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, q), _mm256_castsi256_ps(sign));
#else
  static const float table[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  const uint8_t *from = row + k / 2, a = from[0], b = from[1];
  return (vf){table[a & 15], table[a >> 4], table[b & 15], table[b >> 4]};
#endif
}

// mxfp4, mxfp8, nvfp4: a scale of 8 bits a group and no bias. The group of nvfp4 is half a chunk: its rows
// are read as if a group were a chunk with two scales.
template <Format F>
struct ReadFloat {
  static constexpr long kScalesAChunk = F == Format::nvfp4 ? 2 : 1;
  static constexpr long kBits = F == Format::mxfp8 ? 8 : 4;
  const uint8_t *bytes, *scales;
  float wide[kScales * kScalesAChunk];
  vf scale[kScalesAChunk];

  INLINE_MEMBER void open(const Weight& w, long n) {
    bytes = (const uint8_t*)w.data + n * (w.k / 8 * kBits);
    scales = (const uint8_t*)w.scales + n * (w.k / w.group);
  }
  INLINE_MEMBER void prefetch(const Weight& w, long k, long ahead, long count) const {
    prefetch_rows(bytes, w.k / 8 * kBits, k / 8 * kBits, CHUNK / 8 * kBits, ahead, count);
  }
  INLINE_MEMBER void widen(long g, long count) {
    const uint8_t* from = scales + g * kScalesAChunk;
    for (long i = 0; i < least(count, kScales) * kScalesAChunk; ++i)
      wide[i] = F == Format::nvfp4 ? e4m3_to_float(from[i]) : e8m0_to_float(from[i]);
  }
  INLINE_MEMBER void prefetch_scales(const Weight& w, long g, long ahead, long count) const {
    __builtin_prefetch(scales + ahead * (w.k / w.group) + g * kScalesAChunk * count);
  }
  INLINE_MEMBER void group(unsigned i) {
    for (int part = 0; part < kScalesAChunk; ++part) scale[part] = splat(wide[i * kScalesAChunk + part]);
  }
  INLINE_MEMBER vf vector(long k) const {
    vf q = F == Format::mxfp8 ? load_e4m3(bytes + k) : load_e2m1(bytes, k);
    return q * scale[k / 16 % kScalesAChunk];
  }
};
