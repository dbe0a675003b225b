// Floats to quantized weights. Included by quantize_isa.cpp alone, behind vec.h and narrow.h. A tile is W groups:
// a lane is a group, so nothing is ever summed across lanes, and each step serves W groups at once.

typedef uint32_t vw __attribute__((vector_size(sizeof(vf)), may_alias));

constexpr long kMaxGroup = 128;

INLINE vf choose(vi holds, vf yes, vf no) { return (vf)((holds & (vi)yes) | (~holds & (vi)no)); }

INLINE vf magnitude(vf v) { return (vf)((vi)v & 0x7fffffff); }

// To the nearest integer, ties to even.
INLINE vf nearest(vf v) {
#if defined(MLXSERVE_AVX512)
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(MLXSERVE_AVX2)
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // From 2 ** 23 on floats are integers; below, adding it leaves no room for a fraction.
  vf a = magnitude(v), rounded = (vf)((vi)((a + 0x1p23f) - 0x1p23f) | ((vi)v & (int)0x80000000));
  return choose(a < splat(0x1p23f), rounded, v);
#endif
}

template <Format F>
INLINE vf rounded_to(vf v) {
  if constexpr (F == Format::float32) return v;
  uint16_t stored[W];
  if constexpr (F == Format::float16) {
    store_half(stored, v);
    return load_half(stored);
  } else {
    store_bfloat(stored, v);
    return load_bfloat(stored);
  }
}

template <Format F>
INLINE vf load_as(const char* p, long i) {
  if constexpr (F == Format::float32) return load((const float*)p + i);
  else if constexpr (F == Format::float16) return load_half((const uint16_t*)p + i);
  else return load_bfloat((const uint16_t*)p + i);
}

// W vectors of W lanes, transposed: blocks of S lanes swap places, S doubling.
template <int S>
INLINE void transpose(vf* r) {
  vi low, high;
  for (int l = 0; l < W; ++l) low[l] = l & S ? W + l - S : l, high[l] = l & S ? W + l : l + S;
  for (int i = 0; i < W; ++i) {
    if (i & S) continue;
    vi a = (vi)r[i], b = (vi)r[i + S];
    r[i] = (vf)__builtin_shuffle(a, b, low);
    r[i + S] = (vf)__builtin_shuffle(a, b, high);
  }
  if constexpr (2 * S < W) transpose<2 * S>(r);
}

// Value i of lane l is value i of group l; lanes from `count` on repeat the first group.
template <Format F>
INLINE void load_tile(const char* from, long group, long count, vf* x) {
  const long bytes = group * (F == Format::float32 ? 4 : 2);
  for (long at = 0; at < group; at += W) {
    for (long l = 0; l < W; ++l) x[at + l] = load_as<F>(from + (l < count ? l : 0) * bytes, at);
    transpose<1>(x + at);
  }
}

// Codes of `bits` bits, the first in the lowest bits of the first word: `count` lanes to rows of words.
INLINE void store_codes(const vi* codes, long group, int bits, long count, uint32_t* to) {
  const long words = group * bits / 32;
  vw packed[kMaxGroup / 4];
  vw word = {};
  int at = 0;
  vw* next = packed;
  for (long i = 0; i < group; ++i) {
    vw code = (vw)codes[i];
    word |= code << at;
    at += bits;
    if (at < 32) continue;
    *next++ = word;
    at -= 32;
    word = at ? code >> (bits - at) : (vw){};
  }
  const uint32_t* lanes = (const uint32_t*)packed;
  for (long l = 0; l < count; ++l)
    for (long i = 0; i < words; ++i) to[l * words + i] = lanes[i * W + l];
}

template <Format F>
INLINE void store_scales(void* to, vf v, long at, long count) {
  for (long l = 0; l < count; ++l) {
    if constexpr (F == Format::float32) ((float*)to)[at + l] = v[l];
    else ((uint16_t*)to)[at + l] = F == Format::float16 ? half_of(v[l]) : bfloat_of(v[l]);
  }
}

// A code for x; NaN becomes 0.
INLINE vf to_code(vf x, vf largest) {
  vf q = nearest(x);
  q = q > (vf){} ? q : (vf){};
  return q < largest ? q : largest;
}

struct Line {
  vf scale, bias;
};

// mx.quantize's line through a group: the end that is farther from 0 is met, and 0, too. A group without a range
// has a scale of 1e-7. NaN is passed over, as comparing with it is never true.
INLINE Line widest_line(const vf* x, long group, vf largest) {
  vf lo = splat(__builtin_inff()), hi = -lo;
  for (long i = 0; i < group; ++i) {
    hi = hi < x[i] ? x[i] : hi;
    lo = x[i] < lo ? x[i] : lo;
  }
  vf scale = (hi - lo) / largest, least = splat((float)1e-7);
  scale = scale < least ? least : scale;
  vi is_low = magnitude(lo) > magnitude(hi);
  scale = choose(is_low, scale, -scale);
  vf edge = choose(is_low, lo, hi), zero = nearest(edge / scale);
  vi is_far = zero != (vf){};
  return {choose(is_far, edge / zero, scale), choose(is_far, edge, (vf){})};
}

// The best codes for a line, as to_code(x * steps + shift).
struct Coder {
  vf steps, shift;
  explicit INLINE_MEMBER Coder(const Line& line) {
    steps = choose(line.scale != (vf){}, 1.0f / line.scale, (vf){});
    shift = -line.bias * steps;
  }
  INLINE_MEMBER vf operator()(vf x, vf largest) const { return to_code(fma(x, steps, shift), largest); }
};

struct Fit {
  vf error;    // the sum of (weighted) squares with the line's own codes
  Line better;  // the line of least squares for those codes
};

// `weights` null: all count the same. Sums are taken about `centre`, which a group far from 0 needs.
template <bool IS_WEIGHTED>
INLINE Fit fit_line(const vf* x, const vf* weights, vf centre, long group, vf largest, const Line& line) {
  const Coder code(line);
  vf error = {}, w = splat((float)group), wq = {}, wqq = {}, wx = {}, wqx = {};
  if (IS_WEIGHTED) w = (vf){};
  for (long i = 0; i < group; ++i) {
    vf q = code(x[i], largest), away = fma(q, line.scale, line.bias) - x[i], y = x[i] - centre;
    if (IS_WEIGHTED) {
      vf p = weights[i], pq = p * q;
      error = fma(p * away, away, error);
      w = w + p, wq = wq + pq, wx = fma(p, y, wx), wqq = fma(pq, q, wqq), wqx = fma(pq, y, wqx);
    } else {
      error = fma(away, away, error);
      wq = wq + q, wx = wx + y, wqq = fma(q, q, wqq), wqx = fma(q, y, wqx);
    }
  }
  vf spread = w * wqq - wq * wq;
  vf scale = choose(spread > (vf){}, (w * wqx - wq * wx) / spread, line.scale);
  return {error, {scale, (wx - scale * wq) / w + centre}};
}

// Lines through narrower ranges (some ends are cut off, the rest is finer), each drawn to the line of least squares
// of its codes a few times; all that are tried are as they will be stored. Never worse than the start.
template <Format F, bool IS_WEIGHTED>
INLINE Line searched_line(const vf* x, const vf* weights, long group, vf largest, Line start, long effort) {
  start = {rounded_to<F>(start.scale), rounded_to<F>(start.bias)};
  vf lo = x[0], hi = x[0];
  for (long i = 1; i < group; ++i) hi = hi < x[i] ? x[i] : hi, lo = x[i] < lo ? x[i] : lo;
  vf centre = 0.5f * lo + 0.5f * hi, half = 0.5f * hi - 0.5f * lo;
  Line best = start;
  vf least = splat(__builtin_inff());
  for (long cut = 0; cut < effort; ++cut) {
    Line line = start;
    if (cut) {
      vf reach = half * (1.0f - 0.6f / (float)effort / __builtin_sqrtf(largest[0]) * 2.0f * (float)cut);
      line = {2.0f * reach / largest, centre - reach};
    }
    for (long turn = 0; turn < 3; ++turn) {
      line = {rounded_to<F>(line.scale), rounded_to<F>(line.bias)};
      Fit fit = fit_line<IS_WEIGHTED>(x, weights, centre, group, largest, line);
      vi is_less = fit.error < least;
      best = {choose(is_less, line.scale, best.scale), choose(is_less, line.bias, best.bias)};
      least = choose(is_less, fit.error, least);
      line = fit.better;
    }
  }
  return best;
}

template <Format F>
static void affine_tile(const Quantization& job, long first, long count) {
  vf x[kMaxGroup];
  vi codes[kMaxGroup];
  const long group = job.group;
  load_tile<F>((const char*)job.x + first * group * (F == Format::float32 ? 4 : 2), group, count, x);
  const vf largest = splat((float)((1 << job.bits) - 1));
  Line line = widest_line(x, group, largest);
  if (job.effort == 0) {
    for (long i = 0; i < group; ++i)
      codes[i] = __builtin_convertvector(to_code((x[i] - line.bias) / line.scale, largest), vi);
  } else {
    if (job.importance) {
      float rows[W][kMaxGroup];
      vf weights[kMaxGroup];
      for (long l = 0; l < W; ++l)
        __builtin_memcpy(rows[l], job.importance + (first + l) % job.groups_per_row * group, group * sizeof(float));
      for (long i = 0; i < group; ++i)
        for (long l = 0; l < W; ++l) weights[i][l] = rows[l][i];
      line = searched_line<F, true>(x, weights, group, largest, line, job.effort);
    } else {
      line = searched_line<F, false>(x, nullptr, group, largest, line, job.effort);
    }
    const Coder code(line);
    for (long i = 0; i < group; ++i) codes[i] = __builtin_convertvector(code(x[i], largest), vi);
  }
  store_codes(codes, group, job.bits, count, job.words + first * (group * job.bits / 32));
  store_scales<F>(job.scales, line.scale, first, count);
  store_scales<F>(job.biases, line.bias, first, count);
}

// The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with its sign in bit 3; ties go to the smaller one, -0 is 0.
INLINE vi to_e2m1(vf x) {
  const float middles[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  vf a = magnitude(x);
  vi code = {};
  for (float middle : middles) code -= a > splat(middle);
  vi sign = (vi)((vw)(vi)x >> 28) & 8;
  return code | (sign & (code != 0));
}

// E4M3 without infinities, ties to even, what is beyond 448 becomes 448.
INLINE vi to_e4m3(vf x) {
  vf a = magnitude(x);
  vi bits = (vi)a;
  vi normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  vi subnormal = __builtin_convertvector(nearest(choose(a < splat(1.0f), a, (vf){}) * 512.0f), vi);
  vi is_small = a < splat(0x1p-6f), is_fit = a < splat(448.0f);
  vi code = (is_small & subnormal) | (~is_small & normal);
  return (is_fit & code) | (~is_fit & 0x7e) | ((vi)((vw)(vi)x >> 24) & 0x80);
}

INLINE vf from_e4m3(vi code) {
  vi m = code & 0x7f;
  vf normal = (vf)((m << 20) + (120 << 23)), subnormal = to_floats(m) * 0x1p-9f;
  return choose(m < 8, subnormal, normal);
}

// The mx and nv modes as mx.quantize computes them, each step in the type of x.
template <Format F>
static void float_tile(const Quantization& job, long first, long count) {
  vf x[kMaxGroup];
  vi codes[kMaxGroup];
  const long group = job.group;
  load_tile<F>((const char*)job.x + first * group * (F == Format::float32 ? 4 : 2), group, count, x);
  vf top = {};
  for (long i = 0; i < group; ++i) top = top < magnitude(x[i]) ? magnitude(x[i]) : top;
  vf share = rounded_to<F>(top / splat(job.bits == 4 ? 6.0f : 448.0f)), scale;
  vi stored;
  if (group == 16) {
    stored = to_e4m3(share);
    scale = rounded_to<F>(from_e4m3(stored));
  } else {
    // The power of two that is no less, so that nothing is cut off; a group of zeros has 1.
    vi bits = (vi)share, exponent = (bits >> 23) - ((bits & 0x7fffff) != 0), is_zero = bits == 0;
    stored = (is_zero & 127) | (~is_zero & exponent);
    scale = (vf)(stored << 23);
  }
  const vi has_scale = scale != (vf){};
  for (long i = 0; i < group; ++i) {
    vf q = rounded_to<F>(x[i] / scale);
    codes[i] = (job.bits == 4 ? to_e2m1(q) : to_e4m3(q)) & has_scale;
  }
  store_codes(codes, group, job.bits, count, job.words + first * (group * job.bits / 32));
  for (long l = 0; l < count; ++l) ((uint8_t*)job.scales)[first + l] = (uint8_t)stored[l];
}

template <Format F>
static void quantize_some(const Quantization& job, long begin, long end) {
  for (long first = begin; first < end; first += W) {
    const long count = least(W, end - first);
    if (job.is_affine) affine_tile<F>(job, first, count);
    else float_tile<F>(job, first, count);
  }
}
