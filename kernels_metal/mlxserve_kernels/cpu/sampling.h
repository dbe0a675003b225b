// Reading over large vocabularies. Included by isa.cpp alone (see vec.h).

typedef uint32_t vu __attribute__((vector_size(sizeof(vf)), may_alias));

// Bit l: lane l is set.
INLINE unsigned lanes(vi mask) {
#if defined(MLXSERVE_AVX512)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(MLXSERVE_AVX2)
  return (unsigned)_mm256_movemask_ps((vf)mask);
#else
  unsigned bits = 0;
  for (int l = 0; l < W; ++l) bits |= (mask[l] & 1u) << l;
  return bits;
#endif
}

// W values from i on, of n; -inf behind the last one.
INLINE vf load_or_lowest(const float* x, long i, long n) {
  if (i + W <= n) return load(x + i);
  vf v = splat(-__builtin_inff());
  for (long l = i; l < n; ++l) v[l - i] = x[l];
  return v;
}

INLINE vi ids_from(long first) {
  vi ids;
  for (int l = 0; l < W; ++l) ids[l] = (int)first + l;
  return ids;
}

INLINE vi is_inside(vf x, vi ids, const Cut& cut) {
  vf least = splat(cut.least);
  return (vi)(x > least) | ((vi)(x == least) & (vi)(ids <= (vi){} + cut.last));
}

static bool block_maxima(const float* x, long n, float* maxima) {
  vi strange = {};
  for (long begin = 0; begin < n; begin += kSampleBlock) {
    long end = least(begin + kSampleBlock, n);
    vf top = splat(-__builtin_inff()), other = top;
    for (long i = begin; i < end; i += 2 * W) {
      vf a = load_or_lowest(x, i, end), b = load_or_lowest(x, i + W, end);
      strange |= (vi)(a != a) | (vi)(b != b);
      top = greater(a, top), other = greater(b, other);
    }
    maxima[begin / kSampleBlock] = greatest(greater(top, other));
  }
  return lanes(strange) == 0;
}

// A sum of floats in doubles.
struct WideSum {
#if defined(MLXSERVE_AVX512)
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  INLINE_MEMBER void add(vf v) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
  }
  INLINE_MEMBER double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
#elif defined(MLXSERVE_AVX2)
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  INLINE_MEMBER void add(vf v) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(v)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
  }
  INLINE_MEMBER double total() const {
    __m256d both = _mm256_add_pd(low, high);
    return (both[0] + both[2]) + (both[1] + both[3]);
  }
#else
  double lane[W] = {};
  INLINE_MEMBER void add(vf v) {
    for (int l = 0; l < W; ++l) lane[l] += (double)v[l];
  }
  INLINE_MEMBER double total() const { return (lane[0] + lane[2]) + (lane[1] + lane[3]); }
#endif
};

static double weigh(const float* x, long n, float top, float* weights) {
  WideSum sum;
  for (long i = 0; i < n; i += W) {
    vf w = exp_negative(load_or_lowest(x, i, n) - top);
    if (weights) store(weights + i, w);
    sum.add(w);
  }
  return sum.total();
}

static long collect(const float* x, long first, long n, const Cut& cut, float* values, int* ids) {
  long count = 0;
  vi at = ids_from(first);
  for (long i = 0; i < n; i += W, at += W) {
    vf v = load_or_lowest(x, i, n);
    unsigned bits = lanes(is_inside(v, at, cut));
    if (n - i < W) bits &= (1u << (n - i)) - 1;
    if (!bits) continue;
#if defined(MLXSERVE_AVX512)
    _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps((__mmask16)bits, v));
    _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32((__mmask16)bits, (__m512i)at));
    count += __builtin_popcount(bits);
#else
    for (; bits; bits &= bits - 1, ++count) {
      int l = __builtin_ctz(bits);
      values[count] = v[l], ids[count] = at[l];
    }
#endif
  }
  return count;
}

// 32 random bits for a token: two rounds of a mixer of Ellis's and Wellons's "hash prospector" kind, each a
// bijection, with a part of the key before either.
template <class U>
INLINE U noise_bits(U id, const uint32_t* key) {
  U h = id;
  for (int round = 0; round < 2; ++round) {
    h = (h ^ key[round]);
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15)) * 0x846ca68bu;
    h = h ^ (h >> 16);
  }
  return h;
}

// With v uniform in (0, 1), -log(-log(1 - v)) is Gumbel noise; it is at most -log(v).
INLINE double score_of(const Draw& d, float x, uint32_t bits) {
  double v = ((double)bits + 0.5) * 0x1p-32;
  return ((double)x - (double)d.top) / d.temperature - __builtin_log(-__builtin_log1p(-v));
}

// The exact score of few tokens is needed: float32 bounds, from which all the error they can have is kept
// away, rule out the others. For v in (0, 1] log2(v) >= b - 127 with b the bits of v as a float over 2 ** 23.
static void draw(const float* x, long first, long n, Draw& d) {
  constexpr float kLog2 = 0.693147181f, kMargin = 1e-3f;
  // Halves, so that no difference overflows.
  const float half_top = d.top * 0.5f, slope = (float)(d.temperature > 2e-38 ? 2.0 / d.temperature : 1e38) * (1 - 1e-6f);
  float to_beat = (float)d.score - kMargin;
  vi at = ids_from(first);
  for (long i = 0; i < n; i += W, at += W) {
    vf v = load_or_lowest(x, i, n);
    vi inside = is_inside(v, at, d.cut);
    vf rest = (v * 0.5f - half_top) * slope;
    vu bits = noise_bits((vu)at, d.key);
    vf uniform = __builtin_convertvector((vi)(bits >> 1), vf) * 0x1p-31f;
    vf noise = 127 * kLog2 - __builtin_convertvector((vi)uniform, vf) * (kLog2 * 0x1p-23f);
    unsigned left = lanes(inside & (vi)(rest + noise > to_beat));
    for (; left; left &= left - 1) {
      int l = __builtin_ctz(left);
      if (i + l >= n) break;
      double score = score_of(d, x[i + l], bits[l]);
      if (score < d.score || (score == d.score && at[l] > d.token)) continue;
      d.score = score, d.token = at[l];
      to_beat = (float)score - kMargin;
    }
  }
}
