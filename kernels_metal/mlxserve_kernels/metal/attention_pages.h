// Keys and values in pages, as lanes take them from the pools: straight into registers, in the places where the 8x8
// matrices of a simdgroup want them.
//
// A lane holds two neighbouring elements of a row of such a matrix: columns 2 * pair and 2 * pair + 1. A lane reads 8
// neighbouring values instead, 16 bytes of 16-bit ones, and they become its elements of four matrices: matrix n takes
// values 2 * n and 2 * n + 1. Over a row's four lanes these are 32 columns in an order of their own, which is all the
// same to a product. So 8 rows of 64 bytes are one access, and nothing passes through threadgroup memory.
//
// Bits 0: pools of KV, float, half or bfloat. Bits 8 and 4: bytes, as quantized_pages.py lays them out.

// On a GPU arrays stay in registers only where each index is known to the compiler.
#ifdef METAL_ON_HOST
#define UNROLLED
#else
#define UNROLLED _Pragma("clang loop unroll(full)")
#endif

struct Lane {
  uint lane, row, pair;

  explicit Lane(uint index) thread {
    lane = index;
    row = (index / 4 & 4) + index / 2 % 4;
    pair = (index / 8 & 1) * 2 + index % 2;
  }
};

// value(row, pair) of another lane.
inline ushort lane_at(uint row, uint pair) {
  return ushort((row & 4) * 4 + (pair & 2) * 4 + (row & 3) * 2 + (pair & 1));
}

inline simdgroup_float8x8 matrix_of(float first, float second) {
  simdgroup_float8x8 m;
  m.thread_elements()[0] = first;
  m.thread_elements()[1] = second;
  return m;
}

// Eight values of a float type out of 4 words, or 8 of floats.
template <typename KV>
void widen_floats(const thread uint* words, thread float* out) {
  if constexpr (sizeof(KV) == 4) {
    UNROLLED for (int e = 0; e < 8; e++) out[e] = as_type<float>(words[e]);
  } else {
    UNROLLED for (int n = 0; n < 4; n++) {
      const vec<KV, 2> two = as_type<vec<KV, 2>>(words[n]);
      out[2 * n] = float(two[0]);
      out[2 * n + 1] = float(two[1]);
    }
  }
}

// Loads N words, 16 or 8 bytes at a time.
template <int N>
void load_words(const device void* from, thread uint* words) {
  if constexpr (N == 2) {
    const uint2 two = *(const device uint2*)from;
    words[0] = two[0];
    words[1] = two[1];
  } else {
    UNROLLED for (int n = 0; n < N; n += 4) {
      const uint4 four = ((const device uint4*)from)[n / 4];
      UNROLLED for (int k = 0; k < 4; k++) words[n + k] = four[k];
    }
  }
}

// 32 values of each of a lane's neighbouring keys: its rows of the d-th group of the transposed keys of a page. A lane has
// 8 keys of floats; of integers 16, so that it reads 16 bytes as well and a row of 64 slots is one line: the first 8 are
// those of its first block, the others those of its second one.
template <typename KV, int Bits, int D, int Page>
struct Keys {
  static constexpr constant int steps = 4;
  static constexpr constant int loads = Bits == 4 ? 2 : 4;
  static constexpr constant int keys = Bits == 0 ? 8 : 16;
  static constexpr constant int words = Bits == 0 ? 2 * int(sizeof(KV)) : 4;
  static constexpr constant int pool_rows = Bits == 4 ? D / 2 : D;

  uint raw[loads][words];

  void clear() thread {
    UNROLLED for (int n = 0; n < loads; n++)
      UNROLLED for (int k = 0; k < words; k++) raw[n][k] = 0;
  }

  // page: this head's part of a page; slot: of the first key, a multiple of `keys`.
  void load(const device KV* page, int group, int slot, uint row) thread {
    UNROLLED for (int n = 0; n < loads; n++) {
      const int at = (group * loads + n) * 8 + int(row);
      if (at < pool_rows) {
        load_words<words>(page + at * Page + slot, raw[n]);
      } else {
        UNROLLED for (int k = 0; k < words; k++) raw[n][k] = 0;
      }
    }
  }

  // Value d = 32 * group + 8 * step + row of 8 keys: of integers those of one block.
  void widen(int step, int block, const thread float* scales, const thread float* biases, thread float* out) const thread {
    const int first = Bits == 0 ? 0 : 2 * block;
    if constexpr (Bits == 0) {
      widen_floats<KV>(raw[step], out);
    } else if constexpr (Bits == 8) {
      UNROLLED for (int e = 0; e < 8; e++) out[e] = float(as_type<char4>(raw[step][first + e / 4])[e % 4]) * scales[e];
    } else {
      const int shift = step / 2 * 4;
      UNROLLED for (int e = 0; e < 8; e++) {
        const uint q = raw[step % 2][first + e / 4] >> (e % 4 * 8 + shift) & 15;
        out[e] = float(q) * scales[e] + biases[e];
      }
    }
  }
};

// Values of one key that a lane takes at once, 8 * subs of them: 16 bytes where a row of the page has as many for each
// of a row's four lanes.
template <typename KV, int Bits, int DV, int Page>
struct Values {
  static constexpr constant int subs = Bits == 4 ? (DV % 128 == 0 ? 4 : 2) : Bits == 8 && DV % 64 == 0 ? 2 : 1;
  static constexpr constant int words = Bits == 0 ? 2 * int(sizeof(KV)) : Bits == 4 ? 4 : 2 * subs;
  static constexpr constant int width = 32 * subs;
  static constexpr constant int blocks = (DV + width - 1) / width;
  static constexpr constant int groups = (DV + 31) / 32;

  uint raw[words];

  // Where element e of sub-block `sub` of a lane lies in a row.
  static int column(int block, int sub, uint pair, int e) {
    if constexpr (Bits == 0 && sizeof(KV) == 4) return block * 32 + int(pair) * 4 + e % 4 + e / 4 * 16;
    else return block * width + int(pair) * 8 * subs + sub * 8 + e;
  }

  // Of the 32 columns of a sub-block, those of a row's four lanes one after the other, the n-th.
  static int owned_column(int block, int sub, uint n) { return column(block, sub, n / 8, int(n) % 8); }

  // The group of 32 values, counted from the block's first, in which a lane's values lie.
  static int group(uint pair) { return int(pair) * subs / 4; }

  void clear() thread {
    UNROLLED for (int k = 0; k < words; k++) raw[k] = 0;
  }

  void load(const device KV* page, int block, int slot, uint pair) thread {
    if constexpr (Bits == 8) {
      load_words<words>(page + slot * DV + column(block, 0, pair, 0), raw);
    } else if constexpr (Bits == 4) {
      // With two sub-blocks two lanes share the 16 bytes of a group: one takes the low halves, the other the high ones.
      const int at = block * subs + group(pair);
      if (at < groups) load_words<4>(page + slot * (DV / 2) + at * 16, raw);
      else clear();
    } else if constexpr (DV * sizeof(KV) % 16 == 0) {
      UNROLLED for (int n = 0; n < words; n += 4) {
        const int at = column(block, 0, pair, n);
        UNROLLED for (int k = 0; k < 4; k++) raw[n + k] = 0;
        if (at < DV) load_words<4>(page + slot * DV + at, raw + n);
      }
    } else {
      load_single(page + slot * DV, block, pair);
    }
  }

  // Rows that start anywhere.
  void load_single(const device KV* row, int block, uint pair) thread {
    KV values[8];
    UNROLLED for (int e = 0; e < 8; e++) {
      const int at = column(block, 0, pair, e);
      values[e] = at < DV ? row[at] : KV(0);
    }
    UNROLLED for (int k = 0; k < words; k++) {
      if constexpr (sizeof(KV) == 4) {
        raw[k] = as_type<uint>(values[k]);
      } else {
        vec<KV, 2> two;
        two[0] = values[2 * k];
        two[1] = values[2 * k + 1];
        raw[k] = as_type<uint>(two);
      }
    }
  }

  void widen(int sub, uint pair, float scale, float bias, thread float* out) const thread {
    if constexpr (Bits == 0) {
      widen_floats<KV>(raw, out);
    } else if constexpr (Bits == 8) {
      UNROLLED for (int e = 0; e < 8; e++) out[e] = float(as_type<char4>(raw[2 * sub + e / 4])[e % 4]) * scale;
    } else {
      const int shift = (subs == 4 ? sub / 2 : int(pair) % 2) * 4, first = sub % 2 * 2;
      UNROLLED for (int e = 0; e < 8; e++) {
        const uint word = first == 0 ? raw[e / 4] : raw[2 + e / 4];
        out[e] = float(word >> (e % 4 * 8 + shift) & 15) * scale + bias;
      }
    }
  }
};

// Values of 4 neighbouring keys, a run, where rows end inside a line: the run is whole lines, which the 8 lanes of its rows
// read one after the other, 16 bytes each. A lane's own values come to it by shuffles.
template <typename KV, int Bits, int DV, int Page>
struct ValueRun {
  typedef Values<KV, Bits, DV, Page> ValuesOfLane;
  static constexpr constant int row_bytes = Bits == 0 ? DV * int(sizeof(KV)) : DV * Bits / 8;
  static constexpr constant int pieces = row_bytes / 16;
  static constexpr constant int loads = (4 * pieces + 7) / 8;
  // Two rows of 32 bytes are a line, which Values reads at once; rows of floats are the host's alone.
  static constexpr constant bool is_of_use =
      row_bytes % 16 == 0 && row_bytes % 64 != 0 && row_bytes != 32 && (Bits != 0 || sizeof(KV) == 2);

  uint raw[loads][4];

  static int piece_of(int load, Lane lane) { return load * 8 + int(lane.row % 2 * 4 + lane.pair); }

  // page: this head's part of a page; slot: of the run's first key; keys first : end of the run are read.
  void load(const device KV* page, int slot, int first, int end, Lane lane) thread {
    const device uchar* from = (const device uchar*)page + slot * row_bytes;
    UNROLLED for (int n = 0; n < loads; n++) {
      const int piece = piece_of(n, lane), key = piece / pieces;
      UNROLLED for (int k = 0; k < 4; k++) raw[n][k] = 0;
      if (piece < 4 * pieces && key >= first && key < end) load_words<4>(from + piece * 16, raw[n]);
    }
  }

  // A lane's values of block `block` of key 2 * two + row % 2.
  ValuesOfLane values(int two, int block, Lane lane) const thread {
    // Of integers two lanes share a piece: of 8 bits each takes half of it.
    constexpr int shared = Bits == 0 ? 1 : 2;
    const int in_row = (block * 4 + int(lane.pair)) / shared;
    const int piece = (two * 2 + int(lane.row % 2)) * pieces + in_row;
    const int least = (two * 2 * pieces + block * 4 / shared) / 8;
    const int most = ((two * 2 + 1) * pieces + min(block * 4 / shared + 4 / shared, pieces) - 1) / 8;
    const ushort from = lane_at(lane.row / 2 * 2 + uint(piece % 8 / 4), uint(piece % 4));
    uint own[4] = {0, 0, 0, 0};
    UNROLLED for (int n = 0; n < loads; n++) {
      if (n < least || n > most) continue;
      UNROLLED for (int k = 0; k < 4; k++) {
        const uint word = simd_shuffle(raw[n][k], from);
        if (piece / 8 == n && in_row < pieces) own[k] = word;
      }
    }
    ValuesOfLane result;
    if constexpr (Bits == 8) {
      UNROLLED for (int k = 0; k < 2; k++) result.raw[k] = lane.pair % 2 == 0 ? own[k] : own[k + 2];
    } else {
      UNROLLED for (int k = 0; k < 4; k++) result.raw[k] = own[k];
    }
    return result;
  }
};

// The pages of one sequence and kv head, in the pool or, where a table's entry is negative, in the tail.
template <typename KV, int Bits, int D, int DV, int Page, bool HasTail>
struct Pages {
  static constexpr constant int key_bytes = Bits == 0 ? D : D * Bits / 8 + D / 32 * (Bits == 8 ? 4 : 8);
  static constexpr constant int value_bytes = Bits == 0 ? DV : DV * Bits / 8 + DV / 32 * (Bits == 8 ? 4 : 8);

  const device KV* k_pool;
  const device KV* v_pool;
  const device KV* k_tail;
  const device KV* v_tail;
  const device int* table;
  int num_heads, head;

  const device KV* keys(int key) const thread {
    const int entry = table[key / Page];
    const device KV* base = HasTail && entry < 0 ? k_tail : k_pool;
    const size_t page = HasTail && entry < 0 ? -1 - entry : entry;
    return base + (page * num_heads + head) * (key_bytes * Page);
  }
  const device KV* values(int key) const thread {
    const int entry = table[key / Page];
    const device KV* base = HasTail && entry < 0 ? v_tail : v_pool;
    const size_t page = HasTail && entry < 0 ? -1 - entry : entry;
    return base + (page * num_heads + head) * (value_bytes * Page);
  }
};
