// y = x @ w^T in integers, for affine weights in tiles. Included by isa.cpp alone (see vec.h), with AVX-512 VNNI.
//
// Activations become block fixed point: 32 values share a power of two, each is an integer of P signed digits to
// base 256. Weights are small integers already, so the sums over a block are exact; then one float32 fma takes the
// block's sum times the scale, one the bias times the sum of x. With three digits (23 bits) that is float32's own
// accuracy, from exact sums: no order of sums is left but that of the blocks, which is K's. A block with an infinity
// or a NaN gives NaN. One digit is the int8 mode.
//
// How a tile lies in memory: see Weight in kernels.h.

constexpr long XB = 32;   // values of x that share a scale
constexpr int XHEAD = 8;  // words in front of a block of x

struct XHead {
  float unit, sum;           // value of the integer 1; sum of the block
  int center4[3], center8[3];  // of each digit: -8 and -128 times the sum, which center the weights
};
static_assert(sizeof(XHead) == XHEAD * 4);

INLINE long x_block_bytes(long digits) { return XHEAD * 4 + digits * XB; }

static std::size_t digit_bytes(long rows, long k, long digits) {
  return (std::size_t)rows * (k / XB) * x_block_bytes(digits);
}

INLINE long sum_of(__m512i v) { return _mm512_reduce_add_epi32(v); }

template <int P>
INLINE void block_to_digits(const float* x, char* to) {
  vf a = load(x), b = load(x + 16);
  vf largest = _mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b));
  float top = _mm512_reduce_max_ps(largest);
  XHead head = {};
  // max_ps drops a NaN of its first operand: sums keep it.
  float strange = sum(a * 0.0f + b * 0.0f);
  __m512i ia = _mm512_setzero_si512(), ib = ia;
  if (strange != 0.0f) {
    head.unit = head.sum = __builtin_nanf("");
  } else if (top > 0x1p-100f) {
    float inverse;
    if constexpr (P == 1) {
      head.unit = top / 127.0f, inverse = 127.0f / top;
    } else {
      // The largest integer of P balanced digits is `limit`; a power of two keeps x * inverse exact.
      constexpr int kBits = 8 * P - 2;
      constexpr float limit = P == 3 ? 8355711.0f : 32639.0f;
      uint32_t bits;
      __builtin_memcpy(&bits, &top, 4);
      int exponent = (int)(bits >> 23) - 127 - kBits;
      bits = (uint32_t)(127 - exponent) << 23;
      __builtin_memcpy(&inverse, &bits, 4);
      if (top * inverse > limit) exponent += 1, inverse *= 0.5f;
      bits = (uint32_t)(127 + exponent) << 23;
      __builtin_memcpy(&head.unit, &bits, 4);
    }
    ia = _mm512_cvtps_epi32(a * inverse), ib = _mm512_cvtps_epi32(b * inverse);
    int total = (int)sum_of(_mm512_add_epi32(ia, ib));
    head.sum = (float)total * head.unit;
  }
  const __m512i half = _mm512_set1_epi32(128);
  for (int p = 0; p < P; ++p) {
    __m128i da = _mm512_cvtepi32_epi8(ia), db = _mm512_cvtepi32_epi8(ib);
    char* digits = to + XHEAD * 4 + p * XB;
    _mm_storeu_si128((__m128i*)digits, da);
    _mm_storeu_si128((__m128i*)(digits + 16), db);
    int digit_sum = (int)sum_of(_mm512_add_epi32(_mm512_cvtepi8_epi32(da), _mm512_cvtepi8_epi32(db)));
    head.center4[p] = -8 * digit_sum, head.center8[p] = -128 * digit_sum;
    ia = _mm512_srai_epi32(_mm512_add_epi32(ia, half), 8), ib = _mm512_srai_epi32(_mm512_add_epi32(ib, half), 8);
  }
  __builtin_memcpy(to, &head, sizeof head);
}

template <int P>
static void rows_to_digits(const float* x, long rows, long k, char* to) {
  for (long i = 0; i < rows * k; i += XB, to += x_block_bytes(P)) block_to_digits<P>(x + i, to);
}

static void to_digits(const float* x, long rows, long k, long digits, void* to) {
  if (digits == 3) rows_to_digits<3>(x, rows, k, (char*)to);
  else if (digits == 2) rows_to_digits<2>(x, rows, k, (char*)to);
  else rows_to_digits<1>(x, rows, k, (char*)to);
}

INLINE __m512i bytes_of(const char* at) { return _mm512_loadu_si512(at); }

// Memory to ask for on the way: some lines for each group of columns.
struct Fetch {
  const char *at = nullptr, *end = nullptr;
  long step = 0;  // bytes
};

INLINE long line_bytes(long bytes) { return ceil_div(bytes, 64) * 64; }

INLINE void fetch_some(Fetch& fetch) {
  const char* until = fetch.at + least(fetch.step, fetch.end - fetch.at);
  for (; fetch.at < until; fetch.at += 64) __builtin_prefetch(fetch.at, 0, 2);
}

INLINE Fetch next_of(const KeysAhead* ahead, long groups) {
  if (!ahead || __atomic_load_n(ahead->next, __ATOMIC_RELAXED) >= 2 * ahead->count) return {};
  const long i = __atomic_fetch_add(ahead->next, 1, __ATOMIC_RELAXED);
  if (i >= 2 * ahead->count) return {};
  const long bytes = i % 2 ? ahead->value_bytes : ahead->key_bytes;
  const char* at = (i % 2 ? ahead->values : ahead->keys) + ahead->heads[i / 2] * bytes;
  return {at, at + bytes, line_bytes(ceil_div(bytes, groups))};
}

// M rows of x times T tiles; P digits.
template <int P, bool IS_4BIT, int M, int T>
static void tile_block(const Weight& w, const char* tiles, const char* x, long x_row, float* y, long ld,
                       Fetch tiles_ahead, Fetch keys_ahead) {
  const long group_bytes = tile_group_bytes(w), tile_bytes = w.k / w.group * group_bytes;
  const long head_bytes = tile_head_bytes(w);
  const long step = IS_4BIT ? 8 : 4;  // values of k in 64 bytes
  const float center = IS_4BIT ? 8.0f : 128.0f;
  vf sums[M][T], scale[T], bias[T];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) sums[m][t] = (vf){};
  for (long group = 0; group < w.k / w.group; ++group) {
    if constexpr (M > 1) fetch_some(tiles_ahead), fetch_some(keys_ahead);
    const char* data[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const char* head = tiles + t * tile_bytes + group * group_bytes;
      if (w.scale_format == Format::float16) {
        scale[t] = load_half((const uint16_t*)head), bias[t] = load_half((const uint16_t*)head + 16);
      } else if (w.scale_format == Format::bfloat16) {
        scale[t] = load_bfloat((const uint16_t*)head), bias[t] = load_bfloat((const uint16_t*)head + 16);
      } else {
        scale[t] = load((const float*)head), bias[t] = load((const float*)head + 16);
      }
      bias[t] = fma(scale[t], splat(center), bias[t]);
      data[t] = head + head_bytes;
    }
    for (long k = 0; k < w.group; k += XB, x += x_block_bytes(P)) {
      __m512i acc[M][T][P];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const XHead* head = (const XHead*)(x + m * x_row);
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
          __m512i start = _mm512_set1_epi32(IS_4BIT ? head->center4[p] : head->center8[p]);
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) acc[m][t][p] = start;
        }
      }
      auto multiply = [&](const __m512i(&values)[T], long at) INLINE_LAMBDA {
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
          for (int p = 0; p < P; ++p) {
            int four;
            __builtin_memcpy(&four, x + m * x_row + XHEAD * 4 + p * XB + at, 4);
            __m512i digits = _mm512_set1_epi32(four);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) acc[m][t][p] = _mm512_dpbusd_epi32(acc[m][t][p], values[t], digits);
          }
      };
#pragma GCC unroll 8
      for (long at = 0; at < XB; at += step) {
        __m512i values[T];
        if constexpr (IS_4BIT) {
          const __m512i low = _mm512_set1_epi8(15);
          __m512i both[T];
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) {
            both[t] = bytes_of(data[t] + (k + at) * 8);
            values[t] = _mm512_and_si512(both[t], low);
          }
          multiply(values, at);
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) values[t] = _mm512_and_si512(_mm512_srli_epi16(both[t], 4), low);
          multiply(values, at + 4);
        } else {
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) values[t] = bytes_of(data[t] + (k + at) * 16);
          multiply(values, at);
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const XHead* head = (const XHead*)(x + m * x_row);
        vf unit = splat(head->unit), sum = splat(head->sum);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          // Two digits fit into an int, with weights of 4 bits three: 32 * 8 * 8355711 < 2 ** 31.
          __m512i whole = acc[m][t][0];
          if constexpr (P > 1) whole = _mm512_add_epi32(whole, _mm512_slli_epi32(acc[m][t][1], 8));
          if constexpr (P == 3 && IS_4BIT) whole = _mm512_add_epi32(whole, _mm512_slli_epi32(acc[m][t][2], 16));
          vf value = _mm512_cvtepi32_ps(whole);
          if constexpr (P == 3 && !IS_4BIT) value = fma(_mm512_cvtepi32_ps(acc[m][t][2]), splat(65536.0f), value);
          sums[m][t] = fma(value * unit, scale[t], sums[m][t]);
          sums[m][t] = fma(sum, bias[t], sums[m][t]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) store(y + m * ld + t * kTile, sums[m][t]);
}

// Rows that share tiles leave memory idle after the first of them: each four ask for their share of the tiles behind,
// and for keys and values. One row alone reads weights as fast as they come.
template <int P, bool IS_4BIT, int T>
INLINE void tile_rows(const Weight& w, const char* tiles, bool is_last, const char* x, const MatmulTile& tile,
                      long rows, float* y) {
  const long x_row = w.k / XB * x_block_bytes(P), groups = w.k / w.group, bytes = T * groups * tile_group_bytes(w);
  const long share = rows > 1 ? line_bytes(ceil_div(bytes, ceil_div(rows, 4))) : 0;
  for (long row = 0; row < rows; row += 4) {
    Fetch next, keys;
    if (rows > 1) {
      const long at = row / 4 * share;
      if (!is_last && at < bytes)
        next = {tiles + bytes + at, tiles + bytes + least(at + share, bytes), line_bytes(ceil_div(share, groups))};
      keys = next_of(tile.ahead, groups);
    }
    const char* from = x + row * x_row;
    float* to = y + row * tile.ld;
    switch (rows - row) {
      case 1: tile_block<P, IS_4BIT, 1, T>(w, tiles, from, x_row, to, tile.ld, next, keys); break;
      case 2: tile_block<P, IS_4BIT, 2, T>(w, tiles, from, x_row, to, tile.ld, next, keys); break;
      case 3: tile_block<P, IS_4BIT, 3, T>(w, tiles, from, x_row, to, tile.ld, next, keys); break;
      default: tile_block<P, IS_4BIT, 4, T>(w, tiles, from, x_row, to, tile.ld, next, keys);
    }
  }
}

template <int P, bool IS_4BIT>
static void tile_matmul_of(const Weight& w, const char* x, const MatmulTile& t) {
  const long tile_bytes = w.k / w.group * tile_group_bytes(w);
  const long rows = t.row_end - t.row_begin;
  x += t.row_begin * (w.k / XB * x_block_bytes(P));
  for (long col = t.col_begin; col < t.col_end;) {
    const char* tiles = (const char*)w.data + col / kTile * tile_bytes;
    float* y = t.y + t.row_begin * t.ld + col;
    const long count = t.col_end - col >= 2 * kTile && rows > 1 ? 2 : 1;
    const bool is_last = col + 2 * kTile * count > w.n;
    if (count == 2) tile_rows<P, IS_4BIT, 2>(w, tiles, is_last, x, t, rows, y);
    else tile_rows<P, IS_4BIT, 1>(w, tiles, is_last, x, t, rows, y);
    col += kTile * count;
  }
}

template <int P>
static void tile_matmul_with(const Weight& w, const void* x, const MatmulTile& t) {
  if (w.format == Format::tiles4) tile_matmul_of<P, true>(w, (const char*)x, t);
  else tile_matmul_of<P, false>(w, (const char*)x, t);
}

static void tile_matmul(const Weight& w, const void* x, long digits, const MatmulTile& t) {
  if (digits == 3) tile_matmul_with<3>(w, x, t);
  else if (digits == 2) tile_matmul_with<2>(w, x, t);
  else tile_matmul_with<1>(w, x, t);
}
