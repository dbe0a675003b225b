// y = x @ w^T. Included by isa.cpp alone (see vec.h).
//
// The order of a sum: lane l of the accumulator takes k = l, W + l, 2 W + l, ... by fma from 0, then sum4 of
// vec.h. Both paths keep it, so a result depends on its row of x and its row of w alone.

// Readers of one row of w: `group(g)` enters a group, `vector(k)` gives values k .. k + W - 1 of it.
// CHUNK values are of one group whatever the group's size.
constexpr long CHUNK = 32;

constexpr long kScales = 16;  // groups whose scales are widened together

template <Format S>
struct ReadScales {
  const char *scales, *biases;
  float wide[2][kScales];
  static constexpr long kSize = S == Format::float32 ? 4 : 2;

  INLINE_MEMBER void open(const Weight& w, long n) {
    long offset = n * (w.k / w.group) * kSize;
    scales = (const char*)w.scales + offset;
    biases = (const char*)w.biases + offset;
  }
  // The scales of `count` rows, `ahead` rows on, from group g.
  INLINE_MEMBER void prefetch(const Weight& w, long g, long ahead, long count) const {
    const long row = (w.k / w.group) * kSize, at = ahead * row + g * count * kSize;
    for (long i = 0; i < least(count * row - g * count * kSize, kScales * count * kSize); i += 64) {
      __builtin_prefetch(scales + at + i);
      __builtin_prefetch(biases + at + i);
    }
  }
  // Call it for every kScales-th group before its values are read; `count` groups follow in the row.
  INLINE_MEMBER void widen(long g, long count) {
    widen_first<S>(scales + g * kSize, least(count, kScales), wide[0]);
    widen_first<S>(biases + g * kSize, least(count, kScales), wide[1]);
  }
  // Group i of those that were widened last.
  INLINE_MEMBER vf scale(unsigned i) const { return splat(wide[0][i]); }
  INLINE_MEMBER vf bias(unsigned i) const { return splat(wide[1][i]); }
};

template <Format S>
struct ReadAffine4 {
  const uint32_t* words;
  ReadScales<S> scales;
#if defined(MLXSERVE_AVX512)
  vf table;
#elif defined(MLXSERVE_AVX2)
  vf scale, bias;
#else
  float table[16];
#endif

  INLINE_MEMBER void open(const Weight& w, long n) {
    words = (const uint32_t*)w.data + n * (w.k / 8);
    scales.open(w, n);
  }
  // Rows are often too short for the hardware to foresee the next ones: of `count` rows, `ahead` rows on, the
  // share of the chunk at k.
  INLINE_MEMBER void prefetch(const Weight& w, long k, long ahead, long count) const {
    const char* at = (const char*)words + ahead * (w.k / 2) + k / 2 * count;
    for (long i = 0; i < CHUNK / 2 * count; i += 64) __builtin_prefetch(at + i);
  }
  INLINE_MEMBER void widen(long g, long count) { scales.widen(g, count); }
  INLINE_MEMBER void prefetch_scales(const Weight& w, long g, long ahead, long count) const {
    scales.prefetch(w, g, ahead, count);
  }
  INLINE_MEMBER void group(unsigned i) {
#if defined(MLXSERVE_AVX512)
    table = scales.scale(i) * (vf){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + scales.bias(i);
#elif defined(MLXSERVE_AVX2)
    scale = scales.scale(i), bias = scales.bias(i);
#else
    vf s = scales.scale(i), b = scales.bias(i);
    for (int q = 0; q < 16; q += W) store(table + q, s * ((vf){0, 1, 2, 3} + (float)q) + b);
#endif
  }
  INLINE_MEMBER vf vector(long k) const {
    const uint32_t* from = words + (unsigned long)k / 8;
#if defined(MLXSERVE_AVX512)
    // Nibbles 2 j and 2 j + 1 go to the two halves of 64-bit lane j; the permutation reads 4 bits of each.
    const __m512i picks = _mm512_set_epi64(0x3c00000038, 0x3400000030, 0x2c00000028, 0x2400000020,
                                           0x1c00000018, 0x1400000010, 0x0c00000008, 0x0400000000);
    long long both;
    __builtin_memcpy(&both, from, 8);
    return _mm512_permutexvar_ps(_mm512_multishift_epi64_epi8(picks, _mm512_set1_epi64(both)), table);
#elif defined(MLXSERVE_AVX2)
    __m256i q = _mm256_srlv_epi32(_mm256_set1_epi32((int)*from), _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0));
    return scale * _mm256_cvtepi32_ps(_mm256_and_si256(q, _mm256_set1_epi32(15))) + bias;
#else
    uint32_t q = *from >> (k % 8 * 4);
    return (vf){table[q & 15], table[q >> 4 & 15], table[q >> 8 & 15], table[q >> 12 & 15]};
#endif
  }
};

template <Format S>
struct ReadAffine8 {
  const uint8_t* bytes;
  ReadScales<S> scales;
  vf scale, bias;

  INLINE_MEMBER void open(const Weight& w, long n) {
    bytes = (const uint8_t*)w.data + n * w.k;
    scales.open(w, n);
  }
  INLINE_MEMBER void prefetch(const Weight& w, long k, long ahead, long count) const {
    const char* at = (const char*)bytes + ahead * w.k + k * count;
    for (long i = 0; i < CHUNK * count; i += 64) __builtin_prefetch(at + i);
  }
  INLINE_MEMBER void widen(long g, long count) { scales.widen(g, count); }
  INLINE_MEMBER void prefetch_scales(const Weight& w, long g, long ahead, long count) const {
    scales.prefetch(w, g, ahead, count);
  }
  INLINE_MEMBER void group(unsigned i) { scale = scales.scale(i), bias = scales.bias(i); }
  INLINE_MEMBER vf vector(long k) const {
#if defined(MLXSERVE_AVX512)
    vf q = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(bytes + k))));
#elif defined(MLXSERVE_AVX2)
    vf q = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(bytes + k))));
#else
    vf q = {(float)bytes[k], (float)bytes[k + 1], (float)bytes[k + 2], (float)bytes[k + 3]};
#endif
    return scale * q + bias;
  }
};

#include "formats.h"

template <Format F>
struct ReadDense {
  const char* row;

  INLINE_MEMBER void open(const Weight& w, long n) {
    row = (const char*)w.data + n * w.k * (F == Format::float32 ? 4 : 2);
  }
  INLINE_MEMBER void widen(long, long) {}
  INLINE_MEMBER void prefetch_scales(const Weight&, long, long, long) const {}
  INLINE_MEMBER void group(unsigned) {}
  INLINE_MEMBER void prefetch(const Weight&, long, long, long) const {}
  INLINE_MEMBER vf vector(long k) const {
    if constexpr (F == Format::float32) return load((const float*)row + k);
    if constexpr (F == Format::float16) return load_half((const uint16_t*)row + k);
    return load_bfloat((const uint16_t*)row + k);
  }
  // The last k % W values, zeros behind.
  INLINE_MEMBER vf rest(long k, long count) const {
    float values[W] = {};
    for (long i = 0; i < count; ++i) values[i] = load_scalar(row, F, k + i);
    return load(values);
  }
};

// With AVX-512 the direct path reads affine 4-bit values in another order of lanes, by a shift, which other
// execution units do than the permutation behind it. Rows of x follow, and sums are put back in order.
#if defined(MLXSERVE_AVX512)
template <class R>
constexpr bool is_shuffled = false;
template <Format S>
constexpr bool is_shuffled<ReadAffine4<S>> = true;

// Lane 2 j + b has value 8 b + j.
template <class R>
INLINE vf shuffle(vf x) {
  if constexpr (!is_shuffled<R>) return x;
  return _mm512_permutexvar_ps(_mm512_set_epi32(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0), x);
}
template <class R>
INLINE vf unshuffle(vf x) {
  if constexpr (!is_shuffled<R>) return x;
  return _mm512_permutexvar_ps(_mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0), x);
}
template <class R>
INLINE vf shuffled(const R& reader, long k) {
  if constexpr (!is_shuffled<R>) {
    return reader.vector(k);
  } else {
    const __m512i shifts = _mm512_set_epi32(28, 28, 24, 24, 20, 20, 16, 16, 12, 12, 8, 8, 4, 4, 0, 0);
    long long both;
    __builtin_memcpy(&both, reader.words + (unsigned long)k / 8, 8);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi64(both), shifts), reader.table);
  }
}
#else
template <class R>
INLINE vf shuffle(vf x) { return x; }
template <class R>
INLINE vf unshuffle(vf x) { return x; }
template <class R>
INLINE vf shuffled(const R& reader, long k) { return reader.vector(k); }
#endif

template <class R>
constexpr bool is_dense = false;
template <Format F>
constexpr bool is_dense<ReadDense<F>> = true;

// Groups by a shift. Those of 16 are read as halves of a chunk (see ReadFloat).
INLINE int group_shift(const Weight& w) { return w.group == 128 ? 7 : w.group == 64 ? 6 : 5; }

// Calls enter(first group, groups of the row that follow) and then chunk(k, i) for the chunks of these groups,
// i being the group of the chunk among them, until all whole chunks of a row are done.
template <class Enter, class Each>
INLINE void for_chunks(const Weight& w, Enter&& enter, Each&& chunk) {
  const int shift = group_shift(w);
  const long size = w.k / CHUNK * CHUNK, span = w.group ? kScales << shift : size;
  for (long begin = 0; begin < size; begin += span) {
    if (w.group) enter(begin >> shift, (size - begin) >> shift);
    for (long k = begin; k < least(begin + span, size); k += CHUNK) chunk(k, (unsigned)((k - begin) >> shift));
  }
}

// M rows times C columns in registers.
template <class R, int M, int C>
static void direct_block(const Weight& w, const MatmulTile& t, long col) {
  R readers[C];
  vf acc[M][C];
  const float* x = t.x + t.row_begin * w.k;
  const long size = w.k;
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    readers[c].open(w, col + c);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) acc[m][c] = (vf){};
  }
  auto add = [&](long k) INLINE_LAMBDA {
    vf rows[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) rows[m] = shuffle<R>(load(x + m * size + k));
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      vf v = shuffled(readers[c], k);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m][c] = fma(v, rows[m], acc[m][c]);
    }
  };
  for_chunks(
      w,
      [&](long g, long count) INLINE_LAMBDA {
        readers[0].prefetch_scales(w, g, 2 * C, C);
        for (int c = 0; c < C; ++c) readers[c].widen(g, count);
      },
      [&](long k, unsigned group) INLINE_LAMBDA {
        readers[0].prefetch(w, k, 2 * C, C);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) readers[c].group(group);
#pragma GCC unroll 8
        for (int i = 0; i < CHUNK / W; ++i) add(k + i * W);
      });
  if constexpr (is_dense<R>) {
    for (long k = size / CHUNK * CHUNK; k + W <= size; k += W) add(k);
    long k = size / W * W, count = size - k;
    if (count)
      for (int c = 0; c < C; ++c)
        for (int m = 0; m < M; ++m)
          acc[m][c] = fma(readers[c].rest(k, count), load_first(x + m * size + k, count), acc[m][c]);
  }
  for (int m = 0; m < M; ++m) {
    float* y = t.y + (t.row_begin + m) * t.ld + col;
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) acc[m][c] = unshuffle<R>(acc[m][c]);
    if constexpr (C % 4 == 0) {
#pragma GCC unroll 8
      for (int c = 0; c < C; c += 4) {
        v4 s = sum4(acc[m][c], acc[m][c + 1], acc[m][c + 2], acc[m][c + 3]);
        __builtin_memcpy(y + c, &s, sizeof s);
      }
    } else {
      for (int c = 0; c < C; ++c) y[c] = sum(acc[m][c]);
    }
  }
}

template <class R, int M>
static void direct_rows(const Weight& w, const MatmulTile& t) {
  constexpr int C = W == 16 && M == 1 ? 8 : M <= (W == 16 ? 4 : 2) ? 4 : 2;
  long col = t.col_begin;
  for (; col + C <= t.col_end; col += C) direct_block<R, M, C>(w, t, col);
  for (; col < t.col_end; ++col) direct_block<R, M, 1>(w, t, col);
}

template <class R>
static void direct(const Weight& w, const MatmulTile& t) {
  switch (t.row_end - t.row_begin) {
    case 1: return direct_rows<R, 1>(w, t);
    case 2: return direct_rows<R, 2>(w, t);
    case 3: return direct_rows<R, 3>(w, t);
    case 4: return direct_rows<R, 4>(w, t);
  }
}

// Calls body.operator()<R>() with the reader of a weight.
template <template <Format> class R, class Body>
INLINE void with_reader(Format f, Body&& body) {
  if (f == Format::float32) return body.template operator()<R<Format::float32>>();
  if (f == Format::float16) return body.template operator()<R<Format::float16>>();
  return body.template operator()<R<Format::bfloat16>>();
}

template <class Body>
INLINE void with_reader(const Weight& w, Body&& body) {
  if (w.format == Format::affine4) return with_reader<ReadAffine4>(w.scale_format, body);
  if (w.format == Format::affine8) return with_reader<ReadAffine8>(w.scale_format, body);
  if (w.format == Format::affine2) return with_reader<ReadAffine2>(w.scale_format, body);
  if (w.format == Format::affine3) return with_reader<ReadAffine3>(w.scale_format, body);
  if (w.format == Format::affine5) return with_reader<ReadAffine5>(w.scale_format, body);
  if (w.format == Format::affine6) return with_reader<ReadAffine6>(w.scale_format, body);
  if (w.format == Format::mxfp4) return body.template operator()<ReadFloat<Format::mxfp4>>();
  if (w.format == Format::mxfp8) return body.template operator()<ReadFloat<Format::mxfp8>>();
  if (w.format == Format::nvfp4) return body.template operator()<ReadFloat<Format::nvfp4>>();
  with_reader<ReadDense>(w.format, body);
}

static void matmul_direct(const Weight& w, const MatmulTile& t) {
  with_reader(w, [&]<class R>() { direct<R>(w, t); });
}

// Many rows: tiles of TM rows and TN columns. Packed x is [tile][K / W][TM][W], a panel [tile][K / W][TN][W].
constexpr int TM = 4, TN = W == 16 ? 6 : 3;
constexpr long PANEL = 48;
// Unpacking by one permutation is cheap enough to be done again for each block.
constexpr long BLOCK_ROWS = W == 16 ? 4 * kMaxDirectRows : kMaxDirectRows;

static std::size_t packed_floats(long rows, long k) { return ceil_div(rows, TM) * TM * ceil_div(k, W) * W; }
static std::size_t panel_floats(long k) { return PANEL * ceil_div(k, W) * W; }

static void pack(const float* x, long rows, long k, float* packed) {
  for (long tile = 0; tile < rows; tile += TM)
    for (long i = 0; i < k; i += W)
      for (int m = 0; m < TM; ++m, packed += W) {
        const float* from = x + (tile + m) * k + i;
        if (tile + m >= rows) store(packed, (vf){});
        else store(packed, k - i >= W ? load(from) : load_first(from, k - i));
      }
}

template <class R>
static void fill_panel(const Weight& w, long begin, long end, float* panel) {
  long steps = ceil_div(w.k, W);
  for (long tile = begin; tile < end; tile += TN)
    for (int c = 0; c < TN; ++c) {
      float* to = panel + (tile - begin) * steps * W + c * W;
      if (tile + c >= end) {
        for (long i = 0; i < steps; ++i) store(to + i * TN * W, (vf){});
        continue;
      }
      R reader;
      reader.open(w, tile + c);
          for_chunks(
          w, [&](long g, long count) INLINE_LAMBDA { reader.widen(g, count); },
          [&](long k, unsigned group) INLINE_LAMBDA {
            reader.group(group);
            for (int i = 0; i < CHUNK; i += W) store(to + (k + i) * TN, reader.vector(k + i));
          });
      if constexpr (is_dense<R>)
        for (long k = w.k / CHUNK * CHUNK; k + W <= w.k; k += W) store(to + k * TN, reader.vector(k));
      if constexpr (is_dense<R>)
        if (w.k % W) store(to + w.k / W * TN * W, reader.rest(w.k / W * W, w.k % W));
    }
}

static void fill_any(const Weight& w, long begin, long end, float* panel) {
  with_reader(w, [&]<class R>() { fill_panel<R>(w, begin, end, panel); });
}

// TM rows of y, TN columns.
INLINE void tile_sums(const float* x, const float* w, long steps, float* y, long ld) {
  static_assert(TN == 3 || TN == 6);
  vf acc[TM][TN];
  for (int m = 0; m < TM; ++m)
    for (int c = 0; c < TN; ++c) acc[m][c] = (vf){};
  for (long i = 0; i < steps; ++i, x += TM * W, w += TN * W) {
    vf rows[TM];
    for (int m = 0; m < TM; ++m) rows[m] = load(x + m * W);
#pragma GCC unroll 8
    for (int c = 0; c < TN; ++c) {
      vf v = load(w + c * W);
#pragma GCC unroll 8
      for (int m = 0; m < TM; ++m) acc[m][c] = fma(v, rows[m], acc[m][c]);
    }
  }
  // The columns in fours, the last ones in a pair where there is one.
#pragma GCC unroll 8
  for (int m = 0; m < TM; ++m, y += ld) {
    vf none = {};
    v4 s = sum4(acc[m][0], acc[m][1], acc[m][2], TN > 3 ? acc[m][TN > 3 ? 3 : 0] : none);
    __builtin_memcpy(y, &s, least(TN, 4) * sizeof(float));
    if constexpr (TN > 4) {
      s = sum4(acc[m][4], acc[m][5], none, none);
      __builtin_memcpy(y + 4, &s, 2 * sizeof(float));
    }
  }
}

static void matmul_panel(const Weight& w, const MatmulTile& t, const float* packed, float* panel) {
  long steps = ceil_div(w.k, W);
  fill_any(w, t.col_begin, t.col_end, panel);
  // A block of rows stays in the second-level cache while all columns of the panel pass over it.
  long block = most(TM, least(256, (1 << 16) / (steps * W) / TM * TM));
  for (long rows = t.row_begin; rows < t.row_end; rows += block)
    for (long col = t.col_begin; col < t.col_end; col += TN)
      for (long row = rows; row < least(rows + block, t.row_end); row += TM) {
        const float *from = packed + row * steps * W, *weights = panel + (col - t.col_begin) * steps * W;
        float* y = t.y + row * t.ld + col;
        if (row + TM <= t.row_end && col + TN <= t.col_end) {
          tile_sums(from, weights, steps, y, t.ld);
          continue;
        }
        float sums[TM][TN];
        tile_sums(from, weights, steps, sums[0], TN);
        for (long m = 0; m < least(TM, t.row_end - row); ++m)
          for (long c = 0; c < least(TN, t.col_end - col); ++c) y[m * t.ld + c] = sums[m][c];
      }
}
