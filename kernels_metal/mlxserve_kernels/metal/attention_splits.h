// What the splits of attention.h have in common: which rows a tile has, and how a row's splits are merged.

constant constexpr int split_keys = 256;
constant constexpr int simdgroup_keys = 64;

// exp(part - whole), where a part without any score counts nothing.
inline float share_of(float part, float whole) { return part == -INFINITY ? 0.0f : precise::exp(part - whole); }

// A softmax's state in one row over the splits up to now. Each fma is spelt out, so that no kernel rounds otherwise.
struct Merged {
  float greatest = -INFINITY, sum = 0;
  // What the last merge multiplied old and new values by.
  float kept = 1, added = 0;

  void merge(float part_greatest, float part_sum) thread {
    const float best = part_greatest > greatest ? part_greatest : greatest;
    kept = share_of(greatest, best);
    added = share_of(part_greatest, best);
    greatest = best;
    sum = fma(part_sum, added, sum * kept);
  }
  float value(float old, float part) const thread { return fma(part, added, old * kept); }

  // One more logit, that of no key.
  void merge_sink(float sink) thread {
    merge(sink, 1);
    added = 0;
  }
};

// The rows of a tile: `count` tokens from `first` on, the first at `position` of sequence `sequence`.
struct TileRows {
  int sequence, first, count, position;

  bool has_sequence(int num_sequences) const thread { return sequence < num_sequences; }
};

// Tile `tile` starts in the last sequence s whose first tile, q_starts[s] / Tokens + s, is not behind it: tiles enough for
// every sequence, known without one look at the lengths. Rows behind the last sequence count as one more.
template <int Tokens>
TileRows find_rows(const device int* q_starts, const device int* kv_lens, int num_sequences, int num_tokens, int tile) {
  int low = 0, high = num_sequences;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    const int begin = Tokens == 1 ? q_starts[middle] : q_starts[middle] / Tokens + middle;
    if (begin <= tile) low = middle;
    else high = middle - 1;
  }
  const bool is_last = low == num_sequences;
  const int begin = q_starts[low], end = is_last ? num_tokens : q_starts[low + 1];
  TileRows rows;
  rows.sequence = low;
  rows.first = Tokens == 1 ? tile : begin + (tile - begin / Tokens - low) * Tokens;
  rows.count = min(Tokens, end - rows.first);
  rows.position = is_last ? 0 : kv_lens[low] - (end - rows.first);
  return rows;
}

// Merges splits in registers.
template <typename TileType>
struct Accumulated {
  Merged state[TileType::owned];
  float values[TileType::value_blocks][TileType::owned];

  explicit Accumulated(float start) thread {
    UNROLLED for (int block = 0; block < TileType::value_blocks; block++)
      UNROLLED for (int n = 0; n < TileType::owned; n++) values[block][n] = start;
  }

  void take(thread TileType& tile, int split, int block, int sub) thread {
    const int at = block * TileType::ValuesOfLane::subs + sub;
    UNROLLED for (int n = 0; n < TileType::owned; n++) {
      const int row = tile.owned_row(n);
      if (!tile.sees_split(row, split)) continue;
      if (at == 0) state[n].merge(tile.greatest_of(row), tile.sum_of(row));
      values[at][n] = state[n].value(values[at][n], tile.sum_of_partials(row));
    }
  }
};

// Writes a split's part for merge_splits: stats [split, T, H, 2] and sums [split, T, H, columns], in the order in which
// threads own columns: side by side.
template <typename TileType, int Heads, int DV>
struct Written {
  device float* sums;
  device float* stats;
  // Of the tile's first row; a token has num_heads rows.
  size_t first_row;
  int num_heads;

  void take(thread TileType& tile, int split, int block, int sub) thread {
    constexpr int columns = TileType::value_blocks * 32;
    const int at = (block * TileType::ValuesOfLane::subs + sub) * 32 + int(tile.lane.lane);
    UNROLLED for (int n = 0; n < TileType::owned; n++) {
      const int row = tile.owned_row(n);
      if (!tile.has_row(row) || !tile.sees_split(row, split)) continue;
      const size_t to = first_row + TileType::token_of(row) * num_heads + row % Heads;
      if (at == 0) {
        stats[to * 2] = tile.greatest_of(row);
        stats[to * 2 + 1] = tile.sum_of(row);
      }
      if (tile.owned_column(block, sub) < DV) sums[to * columns + at] = tile.sum_of_partials(row);
    }
  }
};
