// y = x @ w^T. Included by isa.cpp alone (see vec.h).
//
// The order of a sum: lane l of the accumulator takes k = l, W + l, 2 W + l, ... by fma from 0, then sum4 of
// vec.h. Both paths keep it, so a result depends on its row of x and its row of w alone.

// Readers of one row of w: `group(g)` enters a group, `vector(k)` gives values k .. k + W - 1 of it.
struct ReadAffine4 {
  const uint32_t* words;
  const void *scales, *biases;
  Format format;
  vf table, scale, bias;
  float values[16];

  INLINE_MEMBER void open(const Weight& w, long n) {
    words = (const uint32_t*)w.data + n * (w.k / 8);
    long first = n * (w.k / w.group), size = w.scale_format == Format::float32 ? 4 : 2;
    scales = (const char*)w.scales + first * size;
    biases = (const char*)w.biases + first * size;
    format = w.scale_format;
  }
  INLINE_MEMBER void group(long g) {
    float s = load_scalar(scales, format, g), b = load_scalar(biases, format, g);
#if defined(MLXSERVE_AVX512)
    table = splat(s) * (vf){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + splat(b);
#elif defined(MLXSERVE_AVX2)
    scale = splat(s);
    bias = splat(b);
#else
    for (int i = 0; i < 16; ++i) values[i] = s * (float)i + b;
#endif
  }
  INLINE_MEMBER vf vector(long k) const {
#if defined(MLXSERVE_AVX512)
    // Nibbles 2 j and 2 j + 1 go to the two halves of 64-bit lane j; the permutation reads 4 bits of each.
    const __m512i picks = _mm512_set_epi64(0x3c00000038, 0x3400000030, 0x2c00000028, 0x2400000020,
                                           0x1c00000018, 0x1400000010, 0x0c00000008, 0x0400000000);
    long long both;
    __builtin_memcpy(&both, words + k / 8, 8);
    return _mm512_permutexvar_ps(_mm512_multishift_epi64_epi8(picks, _mm512_set1_epi64(both)), table);
#elif defined(MLXSERVE_AVX2)
    __m256i q = _mm256_srlv_epi32(_mm256_set1_epi32((int)words[k / 8]),
                                  _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0));
    return scale * _mm256_cvtepi32_ps(_mm256_and_si256(q, _mm256_set1_epi32(15))) + bias;
#else
    uint32_t q = words[k / 8] >> (k % 8 * 4);
    return (vf){values[q & 15], values[q >> 4 & 15], values[q >> 8 & 15], values[q >> 12 & 15]};
#endif
  }
};

struct ReadAffine8 {
  const uint8_t* bytes;
  const void *scales, *biases;
  Format format;
  vf scale, bias;

  INLINE_MEMBER void open(const Weight& w, long n) {
    bytes = (const uint8_t*)w.data + n * w.k;
    long first = n * (w.k / w.group), size = w.scale_format == Format::float32 ? 4 : 2;
    scales = (const char*)w.scales + first * size;
    biases = (const char*)w.biases + first * size;
    format = w.scale_format;
  }
  INLINE_MEMBER void group(long g) {
    scale = splat(load_scalar(scales, format, g));
    bias = splat(load_scalar(biases, format, g));
  }
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

template <Format F>
struct ReadDense {
  const char* row;

  INLINE_MEMBER void open(const Weight& w, long n) {
    row = (const char*)w.data + n * w.k * (F == Format::float32 ? 4 : 2);
  }
  INLINE_MEMBER void group(long) {}
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

template <class R>
constexpr bool is_dense = false;
template <Format F>
constexpr bool is_dense<ReadDense<F>> = true;

// M rows times C columns in registers.
template <class R, int M, int C>
static void direct_block(const Weight& w, const MatmulTile& t, long col) {
  R readers[C];
  vf acc[M][C];
  const float* x = t.x + t.row_begin * w.k;
  for (int c = 0; c < C; ++c) {
    readers[c].open(w, col + c);
    for (int m = 0; m < M; ++m) acc[m][c] = (vf){};
  }
  long group = is_dense<R> ? w.k / W * W : w.group;
  for (long begin = 0, g = 0; begin + group <= w.k && group; begin += group, ++g) {
    for (int c = 0; c < C; ++c) readers[c].group(g);
    for (long k = begin; k < begin + group; k += W)
      for (int c = 0; c < C; ++c) {
        vf v = readers[c].vector(k);
        for (int m = 0; m < M; ++m) acc[m][c] = fma(v, load(x + m * w.k + k), acc[m][c]);
      }
    if (is_dense<R>) break;
  }
  if constexpr (is_dense<R>) {
    long k = w.k / W * W, count = w.k - k;
    if (count)
      for (int c = 0; c < C; ++c)
        for (int m = 0; m < M; ++m)
          acc[m][c] = fma(readers[c].rest(k, count), load_first(x + m * w.k + k, count), acc[m][c]);
  }
  for (int m = 0; m < M; ++m) {
    float* y = t.y + (t.row_begin + m) * t.ld + col;
    if constexpr (C == 4) {
      v4 s = sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
      __builtin_memcpy(y, &s, sizeof s);
    } else {
      for (int c = 0; c < C; ++c) y[c] = sum(acc[m][c]);
    }
  }
}

template <class R, int M>
static void direct_rows(const Weight& w, const MatmulTile& t) {
  constexpr int C = M <= (W == 16 ? 6 : 2) ? 4 : 2;
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
    case 5: return direct_rows<R, 5>(w, t);
    case 6: return direct_rows<R, 6>(w, t);
    case 7: return direct_rows<R, 7>(w, t);
    case 8: return direct_rows<R, 8>(w, t);
  }
}

static void matmul_direct(const Weight& w, const MatmulTile& t) {
  switch (w.format) {
    case Format::affine4: return direct<ReadAffine4>(w, t);
    case Format::affine8: return direct<ReadAffine8>(w, t);
    case Format::float32: return direct<ReadDense<Format::float32>>(w, t);
    case Format::float16: return direct<ReadDense<Format::float16>>(w, t);
    case Format::bfloat16: return direct<ReadDense<Format::bfloat16>>(w, t);
  }
}

// Many rows: tiles of TM rows and TN columns. Packed x is [tile][K / W][TM][W], a panel [tile][K / W][TN][W].
constexpr int TM = 4, TN = W == 16 ? 6 : 3;
constexpr long PANEL = 48;

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
      long group = is_dense<R> ? w.k / W * W : w.group;
      for (long first = 0, g = 0; first + group <= w.k && group; first += group, ++g) {
        reader.group(g);
        for (long k = first; k < first + group; k += W) store(to + k * TN, reader.vector(k));
        if (is_dense<R>) break;
      }
      if constexpr (is_dense<R>)
        if (w.k % W) store(to + w.k / W * TN * W, reader.rest(w.k / W * W, w.k % W));
    }
}

INLINE void tile_sums(const float* x, const float* w, long steps, float (*sums)[8]) {
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
  for (int m = 0; m < TM; ++m)
    for (int c = 0; c < TN; c += 4) {
      vf none = {};
      v4 s = sum4(acc[m][c], c + 1 < TN ? acc[m][c + 1 < TN ? c + 1 : 0] : none,
                  c + 2 < TN ? acc[m][c + 2 < TN ? c + 2 : 0] : none,
                  c + 3 < TN ? acc[m][c + 3 < TN ? c + 3 : 0] : none);
      __builtin_memcpy(&sums[m][c], &s, sizeof s);
    }
}

static void matmul_panel(const Weight& w, const MatmulTile& t, const float* packed, float* panel) {
  long steps = ceil_div(w.k, W);
  switch (w.format) {
    case Format::affine4: fill_panel<ReadAffine4>(w, t.col_begin, t.col_end, panel); break;
    case Format::affine8: fill_panel<ReadAffine8>(w, t.col_begin, t.col_end, panel); break;
    case Format::float32: fill_panel<ReadDense<Format::float32>>(w, t.col_begin, t.col_end, panel); break;
    case Format::float16: fill_panel<ReadDense<Format::float16>>(w, t.col_begin, t.col_end, panel); break;
    case Format::bfloat16: fill_panel<ReadDense<Format::bfloat16>>(w, t.col_begin, t.col_end, panel); break;
  }
  // A block of rows stays in the second-level cache while all columns of the panel pass over it.
  long block = most(TM, least(256, (1 << 16) / (steps * W) / TM * TM));
  for (long rows = t.row_begin; rows < t.row_end; rows += block)
    for (long col = t.col_begin; col < t.col_end; col += TN)
      for (long row = rows; row < least(rows + block, t.row_end); row += TM) {
        float sums[TM][8];
        tile_sums(packed + row * steps * W, panel + (col - t.col_begin) * steps * W, steps, sums);
        for (long m = 0; m < least(TM, t.row_end - row); ++m)
          for (long c = 0; c < least(TN, t.col_end - col); ++c) t.y[(row + m) * t.ld + col + c] = sums[m][c];
      }
}
