// Scores and sums straight from quantized pages. Included by attention.h alone.
//
// Integers are taken as they are, and scales come in where they cost least: at the end of a group of dimensions for
// keys, in the weights for values. With biases (kv4) a score has, for each group, the query's sum times the bias, and
// a value the sum of weights times biases.

// kKvPageUnit keys and values, which lie side by side: of integer i of the keys `page` bytes on for each i, their
// scales likewise; the values' rows one behind the other.
struct PackedUnit {
  const uint8_t* keys;
  const float* key_scales;
  const uint8_t* values;
};

constexpr long kUnits = KB / kKvPageUnit;
constexpr long kScaledGroups = most(1, AV * W / kKvGroup);  // that one step over the values' dimensions covers

// What the next block is made of, to be asked for line by line between the arithmetic of this one: asked for at
// once it keeps all buffers for missing lines busy, and the loads of this block wait behind it.
struct Ahead {
  const char* from[kUnits];
  long lines = 0;  // of each
  int count = 0;
};

class Asking {
 public:
  INLINE_MEMBER explicit Asking(const Ahead& ahead) : ahead_(ahead) { turn(); }
  INLINE_MEMBER void next() {
    if (left_ == 0) return;
    __builtin_prefetch(now_, 0, 2);
    now_ += 64;
    if (--left_ == 0) turn();
  }
  INLINE_MEMBER void rest() {
    while (left_ != 0) next();
  }

 private:
  INLINE_MEMBER void turn() {
    if (used_ < ahead_.count) now_ = ahead_.from[used_++], left_ = ahead_.lines;
  }

  const Ahead& ahead_;
  const char* now_ = nullptr;
  long left_ = 0;
  int used_ = 0;
};

struct PackedBlock {
  PackedUnit unit[kUnits];
  const float *value_scales, *value_biases;  // [group][KB]
  Ahead ahead_keys, ahead_values;
};

template <Format F>
INLINE vf packed_vector(const uint8_t* from, int half) {
  if constexpr (F == Format::kv8) return to_floats(load_signed(from));
  else return to_floats((load_unsigned(from) >> (4 * half)) & 15);
}

// q [R][dim]; sums [R][dim / kKvGroup] those of the groups of q, for biases.
template <Format F, int R>
static void packed_scores(const float* q, const float* sums, const PackedBlock& block, long page, long dim,
                          float* scores) {
  constexpr int halves = F == Format::kv8 ? 1 : 2;
  constexpr long integers = kKvGroup / halves;
  const long groups = dim / kKvGroup;
  Asking ahead(block.ahead_keys);
  for (long j = 0; j < KB; j += AV * W) {
    const uint8_t* from[AV];
    const float* scales[AV];
    for (int v = 0; v < AV; ++v) {
      const PackedUnit& unit = block.unit[(j + v * W) / kKvPageUnit];
      from[v] = unit.keys + (j + v * W) % kKvPageUnit, scales[v] = unit.key_scales + (j + v * W) % kKvPageUnit;
    }
    for (long g = 0; g < groups; ++g) {
      vf acc[R][AV];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < AV; ++v) acc[r][v] = (vf){};
      const float* x = q + g * kKvGroup;
      for (int half = 0; half < halves; ++half)
        for (long i = 0; i < integers; ++i, ++x) {
          ahead.next();
          vf k[AV];
          for (int v = 0; v < AV; ++v) k[v] = packed_vector<F>(from[v] + i * page, half);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            vf one = splat(x[r * dim]);
#pragma GCC unroll 8
            for (int v = 0; v < AV; ++v) acc[r][v] = fma(one, k[v], acc[r][v]);
          }
        }
      for (int v = 0; v < AV; ++v) {
        from[v] += integers * page;
        const vf scale = load(scales[v] + g * page);
        for (int r = 0; r < R; ++r) {
          float* to = scores + r * KB + j + v * W;
          vf total = g == 0 ? (vf){} : load(to);
          if constexpr (F == Format::kv4)
            total = fma(load(scales[v] + (groups + g) * page), splat(sums[r * groups + g]), total);
          store(to, fma(scale, acc[r][v], total));
        }
      }
    }
  }
  ahead.rest();
}

// Dimensions i to i + NV * W - 1 of the values. `weights` [groups of these][R][KB], `added` likewise without KB.
template <Format F, int R, int NV>
INLINE void add_packed_columns(const PackedBlock& block, const float* weights, const float* added, long from, long to,
                               const float* factors, float* values, long width, long row, long i, Asking& ahead) {
  constexpr int per_group = kKvGroup / W < NV ? kKvGroup / W : NV;
  vf acc[R][NV];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = load(values + r * width + i + v * W) * factors[r];
  for (long j = from; j < to;) {
    const long unit = j / kKvPageUnit, end = least(to, (unit + 1) * kKvPageUnit);
    const uint8_t* integers = block.unit[unit].values + j % kKvPageUnit * row;
    if constexpr (F == Format::kv8) integers += i;
    else integers += i / kKvGroup * (kKvGroup / 2);
    for (; j < end; ++j, integers += row) {
      ahead.next();
      vf x[NV];
      for (int v = 0; v < NV; ++v) {
        if constexpr (F == Format::kv8) {
          x[v] = packed_vector<F>(integers + v * W, 0);
        } else {
          const long at = i % kKvGroup + v * W;
          const long pair = at / kKvGroup * (kKvGroup / 2) + at % (kKvGroup / 2);
          x[v] = packed_vector<F>(integers + pair, int(at / (kKvGroup / 2)) & 1);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v)
          acc[r][v] = fma(splat(weights[(v / per_group * R + r) * KB + j]), x[v], acc[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) {
      if constexpr (F == Format::kv4) acc[r][v] = acc[r][v] + added[v / per_group * R + r];
      store(values + r * width + i + v * W, acc[r][v]);
    }
}

// Lanes of `x` whose keys are from `from` to `to` - 1, zeros else; lane 0 is key j.
INLINE vf within(vf x, long j, long from, long to) {
  if (j >= from && j + W <= to) return x;
  for (int l = 0; l < W; ++l)
    if (j + l < from || j + l >= to) x[l] = 0;
  return x;
}

// values [R][width] = values * factors + weights times the block's values of `dim` dimensions. Weights [R][KB] are 0
// outside of from to to - 1. `scaled`: memory [kScaledGroups][R][KB].
template <Format F, int R>
static void add_packed_values(const PackedBlock& block, const float* weights, long from, long to,
                              const float* factors, float* values, long width, long dim, float* scaled) {
  constexpr long step = AV * W, groups = kScaledGroups;
  const long row = kv_row_integers(F, dim);
  float added[groups * R];
  Asking ahead(block.ahead_values);
  long last = -1;
  for (long i = 0; i < dim; i += step) {
    const long first = i / kKvGroup;
    if (first != last)
      for (long g = 0; g < groups && first + g < dim / kKvGroup; ++g)
        for (int r = 0; r < R; ++r) {
          vf sums = {};
          for (long j = 0; j < KB; j += W) {
            const vf p = load(weights + r * KB + j);
            store(scaled + (g * R + r) * KB + j, p * load(block.value_scales + (first + g) * KB + j));
            if constexpr (F == Format::kv4)
              sums = fma(p, within(load(block.value_biases + (first + g) * KB + j), j, from, to), sums);
          }
          added[g * R + r] = sum(sums);
        }
    last = first;
    if (i + step <= dim)
      add_packed_columns<F, R, AV>(block, scaled, added, from, to, factors, values, width, row, i, ahead);
    else  // one group is left
      add_packed_columns<F, R, least(AV, kKvGroup / W)>(block, scaled, added, from, to, factors, values, width, row, i,
                                                        ahead);
  }
  ahead.rest();
}
