// Paged attention: causal, of several sequences, over keys and values in pages.
//
// A context is cut into splits of 256 keys at fixed positions. A split gives a row its greatest score, the sum of
// exp(score - greatest) and the sum of the values weighted so; splits are merged in order. That is all of a row's
// arithmetic: each part of it depends on the row and the split alone, so a row has the same bits in every kernel here,
// whatever rows it shares a tile with. Products are exact float32 ones of 8x8 matrices in one order.
//
// A threadgroup of 4 simdgroups takes a tile of rows: `Tokens` tokens, of each the `Heads` heads that share a kv head.
// In a split each simdgroup takes 64 keys and reads them once for all rows.
//
//   attend_tile      loops over the splits of its tile and merges them in registers
//   attend_split     one split of its tile, to be merged by merge_splits

// Threadgroup memory of a tile. Rows of queries are padded, so that a matrix's rows lie in different banks.
template <int D, int RowTiles>
struct TileMemory {
  static constexpr constant int rows = 8 * RowTiles;
  static constexpr constant int stride = (D + 7) / 8 * 8 + 8;
  static constexpr constant int queries = rows * stride;
  static constexpr constant int stats = 4 * rows;
  static constexpr constant int partial = 4 * rows * 32;
};

template <typename T, typename KV, int Bits, int D, int DV, int Page, int Heads, int Tokens, int RowTiles, int Window,
          bool HasSoftcap, bool HasTail>
struct Tile {
  typedef TileMemory<D, RowTiles> Memory;
  typedef Keys<KV, Bits, D, Page> KeysOfLane;
  typedef Values<KV, Bits, DV, Page> ValuesOfLane;
  static constexpr constant int rows = Memory::rows;
  static constexpr constant int owned = rows / 4;
  static constexpr constant int value_blocks = ValuesOfLane::blocks * ValuesOfLane::subs;
  static constexpr constant int value_groups = Bits == 0 ? 1 : ValuesOfLane::groups;

  // Decode has registers for the sums of all columns; chunks, which read each value for many rows, go by columns.
  static constexpr constant bool has_runs = ValueRun<KV, Bits, DV, Page>::is_of_use && RowTiles <= 2;

  Lane lane;
  uint simdgroup_index;
  Pages<KV, Bits, D, DV, Page, HasTail> pages;
  TileRows tokens;
  int num_heads;
  float scale, softcap;
  threadgroup T* queries;
  threadgroup float* maxima;
  threadgroup float* sums;
  threadgroup float* partial;

  // Scores, then weights, of a lane's rows and 64 keys: [row tile][32 keys][pairs of keys].
  simdgroup_float8x8 weights[RowTiles][2][4];

  explicit Tile(uint lane_index) thread : lane(lane_index) {}

  static int token_of(int row) { return row / Heads; }
  bool has_row(int row) const thread {
    return row < Tokens * Heads && row / Heads < tokens.count && row % Heads < num_heads;
  }
  // Whether an 8-row tile has a row at all: a token alone leaves most of a large tile empty.
  bool has_rows(int t) const thread { return t * 8 < min(tokens.count, Tokens) * Heads; }
  // The first key that anybody in the tile sees, and the end of them.
  int begin() const thread { return Window > 0 ? max(0, tokens.position - Window + 1) : 0; }
  int end() const thread { return tokens.position + tokens.count; }
  bool sees(int row, int key) const thread {
    const int position = tokens.position + token_of(row);
    return key <= position && (Window == 0 || key > position - Window);
  }
  // Whether a row sees any key of a split.
  bool sees_split(int row, int split) const thread {
    const int position = tokens.position + token_of(row), first = split * split_keys;
    return first <= position && (Window == 0 || first + split_keys > position - Window + 1);
  }
  bool is_loaded(int key, int count) const thread { return key < end() && key + count > begin(); }

  // Rows of q [T, H, D], head `first_head` on, into threadgroup memory; zeros behind D and where there is no row.
  void load_queries(const device T* q, int heads_in_all, int first_head, uint thread_index) thread {
    for (int i = int(thread_index); i < rows * Memory::stride; i += 128) {
      const int row = i / Memory::stride, d = i % Memory::stride;
      T value = T(0);
      if (d < D && has_row(row))
        value = q[(size_t(tokens.first + token_of(row)) * heads_in_all + first_head + row % Heads) * D + d];
      queries[i] = value;
    }
  }

  // The scales of a lane's keys of block b out of those of 64 keys, two a lane.
  void spread(float2 of_keys, int b, thread float* out) const thread {
    UNROLLED for (int e = 0; e < 8; e++) out[e] = simd_shuffle(of_keys[e % 2], ushort(lane.pair * 8 + b * 4 + e / 2));
  }

  // Scores of integers from the order in which lanes read keys, 16 each, to that of floats, which all formats add in.
  void reorder() thread {
    UNROLLED for (int t = 0; t < RowTiles; t++) {
      float read[2][8];
      UNROLLED for (int b = 0; b < 2; b++)
        UNROLLED for (int e = 0; e < 8; e++) read[b][e] = weights[t][b][e / 2].thread_elements()[e % 2];
      UNROLLED for (int b = 0; b < 2; b++)
        UNROLLED for (int e = 0; e < 8; e++) {
          const ushort from = lane_at(lane.row, 2 * b + lane.pair / 2);
          const float even = simd_shuffle(read[0][e], from), odd = simd_shuffle(read[1][e], from);
          weights[t][b][e / 2].thread_elements()[e % 2] = lane.pair % 2 == 0 ? even : odd;
        }
    }
  }

  // weights = (q * scale) . k of the 64 keys from `first` on.
  void score(int first) thread {
    UNROLLED for (int t = 0; t < RowTiles; t++)
      UNROLLED for (int b = 0; b < 2; b++)
        UNROLLED for (int n = 0; n < 4; n++) weights[t][b][n] = matrix_of(0, 0);
    if (!is_loaded(first, simdgroup_keys)) return;
    constexpr int parts = 16 / KeysOfLane::keys;
    const device KV* from[parts];
    bool has_keys[parts];
    UNROLLED for (int b = 0; b < parts; b++) {
      const int key = key_read(first, b);
      has_keys[b] = is_loaded(key, KeysOfLane::keys);
      from[b] = has_keys[b] ? pages.keys(key) : pages.k_pool;
    }
    // Two neighbouring keys' scales a lane.
    const int own = first + int(lane.lane) * 2;
    const bool has_scales = Bits != 0 && is_loaded(own, 2);
    const device float* scales =
        (const device float*)((has_scales ? pages.keys(own) : pages.k_pool) + D * Bits / 8 * Page) + own % Page;
    for (int group = 0; group < (D + 31) / 32; group++) {
      KeysOfLane keys[parts];
      float scale_of[2][8], bias_of[2][8];
      UNROLLED for (int b = 0; b < parts; b++) {
        keys[b].clear();
        if (has_keys[b]) keys[b].load(from[b], group, key_read(first, b) % Page, lane.row);
      }
      if constexpr (Bits != 0) {
        const float2 scale_pair = has_scales ? *(const device float2*)(scales + group * Page) : float2(0);
        UNROLLED for (int b = 0; b < 2; b++) spread(scale_pair, b, scale_of[b]);
      }
      if constexpr (Bits == 4) {
        const float2 bias_pair = has_scales ? *(const device float2*)(scales + (D / 32 + group) * Page) : float2(0);
        UNROLLED for (int b = 0; b < 2; b++) spread(bias_pair, b, bias_of[b]);
      }
      UNROLLED for (int step = 0; step < 4; step++) {
        const int d = group * 32 + step * 8;
        if (d < D) score_step(keys, scale_of, bias_of, step, d);
      }
    }
    if constexpr (Bits != 0) reorder();
  }

  // The first of the keys that a lane reads for block b, or for both.
  int key_read(int first, int b) const thread { return first + b * 32 + int(lane.pair) * KeysOfLane::keys; }

  void score_step(
      const thread KeysOfLane* keys, const thread float (*scale_of)[8], const thread float (*bias_of)[8], int step,
      int d) thread {
    float k[2][8];
    UNROLLED for (int b = 0; b < 2; b++) keys[Bits == 0 ? b : 0].widen(step, b, scale_of[b], bias_of[b], k[b]);
    UNROLLED for (int t = 0; t < RowTiles; t++) {
      if (!has_rows(t)) continue;
      const threadgroup T* at = queries + (t * 8 + int(lane.row)) * Memory::stride + d + int(lane.pair) * 2;
      const simdgroup_float8x8 q = matrix_of(float(at[0]) * scale, float(at[1]) * scale);
      UNROLLED for (int b = 0; b < 2; b++)
        UNROLLED for (int n = 0; n < 4; n++) {
          const simdgroup_float8x8 columns = matrix_of(k[b][2 * n], k[b][2 * n + 1]);
          simdgroup_multiply_accumulate(weights[t][b][n], q, columns, weights[t][b][n]);
        }
    }
  }

  // Soft cap and mask, and each row's greatest score of the 64 keys.
  void mask(int first) thread {
    UNROLLED for (int t = 0; t < RowTiles; t++) {
      const int row = t * 8 + int(lane.row);
      float greatest = -INFINITY;
      UNROLLED for (int b = 0; b < 2; b++)
        UNROLLED for (int n = 0; n < 4; n++)
          UNROLLED for (int i = 0; i < 2; i++) {
            float s = weights[t][b][n].thread_elements()[i];
            if (HasSoftcap) s = softcap * precise::tanh(s / softcap);
            if (!sees(row, first + b * 32 + int(lane.pair) * 8 + n * 2 + i)) s = -INFINITY;
            weights[t][b][n].thread_elements()[i] = s;
            greatest = s > greatest ? s : greatest;
          }
      greatest = max_of(greatest, simd_shuffle_xor(greatest, 1));
      greatest = max_of(greatest, simd_shuffle_xor(greatest, 8));
      if (lane.pair == 0) maxima[simdgroup_index * rows + row] = greatest;
    }
  }
  static float max_of(float a, float b) { return b > a ? b : a; }

  float greatest_of(int row) const thread {
    float greatest = maxima[row];
    for (int s = 1; s < 4; s++) greatest = max_of(greatest, maxima[s * rows + row]);
    return greatest;
  }
  float sum_of(int row) const thread {
    return ((sums[row] + sums[rows + row]) + sums[2 * rows + row]) + sums[3 * rows + row];
  }

  // weights = exp(score - greatest of the split), and each row's sum of the 64 keys.
  void exponentiate() thread {
    UNROLLED for (int t = 0; t < RowTiles; t++) {
      const int row = t * 8 + int(lane.row);
      const float greatest = greatest_of(row);
      const float from = greatest == -INFINITY ? 0.0f : greatest;
      float sum = 0;
      UNROLLED for (int b = 0; b < 2; b++)
        UNROLLED for (int n = 0; n < 4; n++)
          UNROLLED for (int i = 0; i < 2; i++) {
            const float weight = precise::exp(weights[t][b][n].thread_elements()[i] - from);
            weights[t][b][n].thread_elements()[i] = weight;
            sum += weight;
          }
      sum += simd_shuffle_xor(sum, 1);
      sum += simd_shuffle_xor(sum, 8);
      if (lane.pair == 0) sums[simdgroup_index * rows + row] = sum;
    }
  }

  // The key of a split's 64 whose values are row `lane.row` of the n-th matrix of block b.
  int key_of(int b, int n) const thread { return b * 32 + int(lane.row) / 2 * 8 + n * 2 + int(lane.row) % 2; }

  // One split: `take(block, sub)` is called, with all of the simdgroups' sums of values in `partial`, for each 32 columns.
  template <typename Taker>
  void split(int index, thread Taker& taker) thread {
    const int first = index * split_keys + int(simdgroup_index) * simdgroup_keys;
    score(first);
    mask(first);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    exponentiate();

    const bool is_active = is_loaded(first, simdgroup_keys);
    // Whether some row does not see a key whose values are read.
    const bool is_mixed = is_active && tokens.count > 1 &&
        (first + simdgroup_keys > tokens.position + 1 || (Window > 0 && first < end() - Window));
    const device KV* from[2];
    float scales[2][value_groups], biases[2][value_groups];
    UNROLLED for (int b = 0; b < 2; b++) {
      const int key = first + key_of(b, 0) / 8 * 8;
      from[b] = is_loaded(key, 8) ? pages.values(key) : pages.v_pool;
      if constexpr (Bits != 0) load_scales(first + b * 32, scales[b], biases[b]);
    }
    if constexpr (has_runs) {
      simdgroup_float8x8 sum[value_blocks][RowTiles][4];
      UNROLLED for (int block = 0; block < value_blocks; block++) clear(sum[block]);
      if (is_active) weigh_runs(sum, from, scales, biases, first, is_mixed);
      UNROLLED for (int block = 0; block < value_blocks; block++) {
        store_partial(sum[block]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        taker.take(*this, index, block / ValuesOfLane::subs, block % ValuesOfLane::subs);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      return;
    }
    UNROLLED for (int block = 0; block < ValuesOfLane::blocks; block++) {
      ValuesOfLane raw[2][4];
      UNROLLED for (int b = 0; b < 2; b++)
        UNROLLED for (int n = 0; n < 4; n++) {
          const int key = first + key_of(b, n);
          raw[b][n].clear();
          if (is_loaded(key, 1)) raw[b][n].load(from[b], block, key % Page, lane.pair);
        }
      UNROLLED for (int sub = 0; sub < ValuesOfLane::subs; sub++) {
        weigh(raw, scales, biases, block, sub, first, is_active, is_mixed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        taker.take(*this, index, block, sub);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
  }

  // Scales and biases of the values of key first + lane. More than four come through threadgroup memory, so that they are
  // read as they lie; `partial` is free for that until the first sums.
  void load_scales(int first, thread float* scales, thread float* biases) const thread {
    if constexpr (value_groups > 4 && value_groups <= rows) {
      pass_scales(first, 0, scales);
      UNROLLED for (int g = 0; g < value_groups; g++) biases[g] = 0;
      if constexpr (Bits == 4) pass_scales(first, Page * value_groups, biases);
    } else {
      load_own_scales(first + int(lane.lane), scales, biases);
    }
  }

  void pass_scales(int first, int skipped, thread float* of_key) const thread {
    threadgroup float* all = partial + int(simdgroup_index) * rows * 32;
    UNROLLED for (int n = 0; n < value_groups; n++) {
      const int at = n * 32 + int(lane.lane), key = first + at / value_groups;
      const bool is_read = is_loaded(key, 1);
      const device KV* page = is_read ? pages.values(key) : pages.v_pool;
      const device float* of_page = (const device float*)(page + DV * Bits / 8 * Page) + skipped;
      all[at] = is_read ? of_page[key % Page * value_groups + at % value_groups] : 0.0f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLLED for (int g = 0; g < value_groups; g++) of_key[g] = all[int(lane.lane) * value_groups + g];
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  void load_own_scales(int key, thread float* scales, thread float* biases) const thread {
    const bool is_read = is_loaded(key, 1);
    const device KV* page = is_read ? pages.values(key) : pages.v_pool;
    const device float* of_scales = (const device float*)(page + DV * Bits / 8 * Page) + key % Page * value_groups;
    UNROLLED for (int g = 0; g < value_groups; g++) scales[g] = is_read ? of_scales[g] : 0.0f;
    UNROLLED for (int g = 0; g < value_groups; g++)
      biases[g] = Bits == 4 && is_read ? of_scales[Page * value_groups + g] : 0.0f;
  }

  // What a lane's own group of a block has in a key: groups are the same for all lanes that a shuffle reads, so that each
  // is shuffled, and one kept.
  float of_group(const thread float* groups, int block, int key) const thread {
    float kept = 0;
    UNROLLED for (int g = 0; g < ValuesOfLane::subs; g++) {
      const int at = block * ValuesOfLane::subs + g;
      const float one = simd_shuffle(at < value_groups ? groups[at] : 0.0f, ushort(key));
      if (ValuesOfLane::group(lane.pair) == g) kept = one;
    }
    return kept;
  }

  // partial[simdgroup] = weights * values over the simdgroup's 64 keys, for 32 columns.
  void weigh(
      const thread ValuesOfLane (*raw)[4], const thread float (*scales)[value_groups],
      const thread float (*biases)[value_groups], int block, int sub, int first, bool is_active, bool is_mixed) thread {
    simdgroup_float8x8 sum[RowTiles][4];
    clear(sum);
    if (is_active) {
      UNROLLED for (int b = 0; b < 2; b++)
        UNROLLED for (int n = 0; n < 4; n++)
          add_values(sum, raw[b][n], scales[b], biases[b], block, sub, b, n, first, is_mixed);
    }
    store_partial(sum);
  }

  // The same of all columns at once: sum[block * subs + sub].
  void weigh_runs(
      thread simdgroup_float8x8 (*sum)[RowTiles][4], const device KV* const thread* from,
      const thread float (*scales)[value_groups], const thread float (*biases)[value_groups], int first,
      bool is_mixed) thread {
    UNROLLED for (int b = 0; b < 2; b++)
      UNROLLED for (int half_of = 0; half_of < 2; half_of++) {
        ValueRun<KV, Bits, DV, Page> run;
        const int key = first + key_of(b, 2 * half_of) / 4 * 4;
        run.load(from[b], key % Page, begin() - key, end() - key, lane);
        UNROLLED for (int two = 0; two < 2; two++)
          UNROLLED for (int block = 0; block < ValuesOfLane::blocks; block++) {
            const ValuesOfLane raw = run.values(two, block, lane);
            UNROLLED for (int sub = 0; sub < ValuesOfLane::subs; sub++)
              add_values(
                  sum[block * ValuesOfLane::subs + sub], raw, scales[b], biases[b], block, sub, b, 2 * half_of + two, first,
                  is_mixed);
          }
      }
  }

  static void clear(thread simdgroup_float8x8 (*sum)[4]) {
    UNROLLED for (int t = 0; t < RowTiles; t++)
      UNROLLED for (int m = 0; m < 4; m++) sum[t][m] = matrix_of(0, 0);
  }

  // sum += the n-th weights of block b * the values of their keys, for 32 columns.
  void add_values(
      thread simdgroup_float8x8 (*sum)[4], ValuesOfLane raw, const thread float* scales, const thread float* biases,
      int block, int sub, int b, int n, int first, bool is_mixed) thread {
    float v[8], scale_of = 0, bias_of = 0;
    if constexpr (Bits != 0) scale_of = of_group(scales, block, key_of(0, n));
    if constexpr (Bits == 4) bias_of = of_group(biases, block, key_of(0, n));
    raw.widen(sub, lane.pair, scale_of, bias_of, v);
    // A weight of 0 times an infinity is NaN, which a row must not get from a key that it does not see.
    if (is_mixed) add_infinities(sum, v, b, n, first);
    UNROLLED for (int m = 0; m < 4; m++) {
      const simdgroup_float8x8 columns = matrix_of(v[2 * m], v[2 * m + 1]);
      UNROLLED for (int t = 0; t < RowTiles; t++)
        if (has_rows(t)) simdgroup_multiply_accumulate(sum[t][m], weights[t][b][n], columns, sum[t][m]);
    }
  }

  void store_partial(const thread simdgroup_float8x8 (*sum)[4]) thread {
    UNROLLED for (int t = 0; t < RowTiles; t++) {
      threadgroup float* to = partial + (int(simdgroup_index) * rows + t * 8 + int(lane.row)) * 32 + int(lane.pair) * 8;
      UNROLLED for (int m = 0; m < 4; m++)
        UNROLLED for (int i = 0; i < 2; i++) to[m * 2 + i] = sum[t][m].thread_elements()[i];
    }
  }

  // Adds the products of values that are not finite to the rows that see them, and makes these values 0.
  void add_infinities(thread simdgroup_float8x8 (*sum)[4], thread float* v, int b, int n, int first) thread {
    bool is_any = false;
    UNROLLED for (int e = 0; e < 8; e++) is_any |= !isfinite(v[e]);
    if (!simd_any(is_any)) return;
    UNROLLED for (int k = 0; k < 8; k++) {
      const int key = first + b * 32 + k / 2 * 8 + n * 2 + k % 2;
      float value[8];
      UNROLLED for (int e = 0; e < 8; e++) value[e] = simd_shuffle(v[e], lane_at(k, lane.pair));
      UNROLLED for (int t = 0; t < RowTiles; t++) {
        const float weight = simd_shuffle(weights[t][b][n].thread_elements()[k % 2], lane_at(lane.row, k / 2));
        const bool is_seen = sees(t * 8 + int(lane.row), key);
        UNROLLED for (int e = 0; e < 8; e++)
          if (is_seen && !isfinite(value[e])) sum[t][e / 2].thread_elements()[e % 2] += weight * value[e];
      }
    }
    UNROLLED for (int e = 0; e < 8; e++)
      if (!isfinite(v[e])) v[e] = 0;
  }

  // A thread's share of `partial`: column `lane` of rows simdgroup_index, + 4, + 8 …
  int owned_row(int n) const thread { return n * 4 + int(simdgroup_index); }
  int owned_column(int block, int sub) const thread { return ValuesOfLane::owned_column(block, sub, lane.lane); }
  float sum_of_partials(int row) const thread {
    const threadgroup float* at = partial + row * 32 + lane.lane;
    return ((at[0] + at[rows * 32]) + at[2 * rows * 32]) + at[3 * rows * 32];
  }
};
