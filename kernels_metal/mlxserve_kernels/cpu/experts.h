// Products of rows with the experts that each row goes to: rows are grouped by expert, so that each expert's
// weights are read once, and a group takes the kernels that a plain product of as many rows takes. So a row has
// the same bits whatever else its experts are given.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "tiles_view.h"
#include "weight.h"

namespace mlxserve {

// The weights of all experts.
struct ExpertMatrix {
  Weight w{};                   // expert 0; the others follow
  const float* bias = nullptr;  // [experts, n]

  Weight of(long expert) const { return rows_of(w, expert * w.n, w.n); }
};

// The `top_k` largest of n logits, largest first and of equal ones the first: their indices, and their share in
// the softmax over all n, or, `is_normalized`, over themselves. A NaN makes all shares of its row NaN.
void route(const float* logits, long n, long top_k, bool is_normalized, int* ids, float* shares);

// The pairs (row, choice) of a call, pair row * top_k + choice, put in the order of their experts: each has a
// place there.
class Grouping {
 public:
  struct Group {
    long expert;
    long begin, count;  // places
    long packed;        // its first packed row, where it is not few
    bool is_few() const { return count <= kernels().block_rows; }
  };

  Grouping(long rows, long top_k, long experts);

  // ids [rows, top_k], each from 0 to experts - 1.
  void sort(const int* ids);

  // Rows that the groups of any ids need at most, packed.
  long max_packed_rows() const;

  long rows, top_k, experts;
  std::vector<Group> groups;
  std::vector<int> pairs;          // at each place
  std::vector<int> places;         // of each pair
  std::vector<int> packed_places;  // of each packed row, -1 behind the last row of a group
};

// Floats that a thread needs for itself to multiply rows of at most k values, and that the inputs of all places of
// a grouping need, packed or, for tiles, as integers; `packed_rows` as in the grouping.
std::size_t expert_scratch_floats(long k);
std::size_t expert_input_floats(const Grouping& grouping, long packed_rows, long k, bool is_tiled);

// One thread's share of the work on a sorted grouping. `share(units, body)` calls body(begin, end) for ranges
// that cover the units once, on some thread, and returns when all are done; every thread calls the same methods
// in the same order. `own` are expert_scratch_floats of this thread.
template <class Share>
class ExpertWorker {
 public:
  // Which row of an input belongs to a place.
  enum class Order { rows, pairs, places };

  ExpertWorker(const Grouping& grouping, float* own, Share share)
      : grouping_(grouping), use_(kernels()), own_(own), share_(share) {}

  // x becomes the input of the next products, all with tiles or none; `packed` has expert_input_floats.
  void prepare(const float* x, long k, Order order, float* packed, bool to_tiles) {
    x_ = x, k_ = k, order_ = order, packed_ = packed, copied_ = nullptr, to_tiles_ = to_tiles;
    if (to_tiles) {
      share_(long(grouping_.pairs.size()), [&](long begin, long end) {
        for (long place = begin; place < end; ++place) use_.to_digits(input(place), 1, k, digits_, integers(place));
      });
      return;
    }
    if (grouping_.packed_places.empty()) return;
    share_(long(grouping_.packed_places.size()) / use_.row_tile, [&](long begin, long end) {
      for (long tile = begin; tile < end; ++tile) pack_tile(tile * use_.row_tile);
    });
  }

  // y [places, n] = the input times the expert of each place.
  void multiply(const ExpertMatrix& m, float* y) {
    columns(m.w.n, [&](const Grouping::Group& group, const Range& rows, const Range& cols) {
      multiply(m, y, group, rows, cols);
    });
  }

  // gate [places, n] = f(input times gate) * (input times up)
  void multiply_gated(const ExpertMatrix& gate, const ExpertMatrix& up, Activation f, float* gates, float* ups) {
    columns(gate.w.n, [&](const Grouping::Group& group, const Range& rows, const Range& cols) {
      multiply(gate, gates, group, rows, cols);
      multiply(up, ups, group, rows, cols);
      for (long row = rows.begin; row < rows.end; ++row) {
        long at = (group.begin + row) * gate.w.n + cols.begin;
        use_.activate(f, gates + at, ups + at, cols.end - cols.begin);
      }
    });
  }

  // y [rows, top_k, n] = z [places, n]
  void scatter(const float* z, long n, float* y) {
    share_(long(grouping_.places.size()), [&](long begin, long end) {
      for (long pair = begin; pair < end; ++pair)
        std::memcpy(y + pair * n, z + grouping_.places[pair] * n, n * sizeof(float));
    });
  }

  // y [rows, n]: the sum of a row's values in z [places, n], times its shares, in the order of its choices.
  void combine(const float* z, long n, const float* shares, float* y) {
    share_(grouping_.rows, [&](long begin, long end) {
      for (long row = begin; row < end; ++row) combine_row(z, n, shares, row, y + row * n);
    });
  }

  // For one row, on this thread.
  void combine_row(const float* z, long n, const float* shares, long row, float* y) {
    std::memset(y, 0, n * sizeof(float));
    for (long pair = row * grouping_.top_k; pair < (row + 1) * grouping_.top_k; ++pair)
      use_.add_scaled(y, z + grouping_.places[pair] * n, shares[pair], n);
  }

 private:
  static constexpr long kColumns = 16;      // columns of a unit of work at least, with few rows
  static constexpr long kTileColumns = 32;  // with many rows and weights in tiles
  static constexpr long kPartRows = 128;    // rows of a unit, with many

  struct Range {
    long begin, end;
  };

  const float* input(long place) const {
    if (order_ == Order::places) return x_ + place * k_;
    long pair = grouping_.pairs[place];
    return x_ + (order_ == Order::pairs ? pair : pair / grouping_.top_k) * k_;
  }

  // `count` inputs from a place on, one behind the other.
  const float* inputs(long place, long count) {
    if (count == 1 || order_ == Order::places) return input(place);
    for (long i = 0; i < count; ++i) std::memcpy(own_ + i * k_, input(place + i), k_ * sizeof(float));
    return own_;
  }

  char* integers(long place) const {
    return reinterpret_cast<char*>(packed_) + place * use_.digit_bytes(1, k_, digits_);
  }

  void pack_tile(long row) {
    long count = 0;
    while (count < use_.row_tile && grouping_.packed_places[row + count] >= 0) ++count;
    use_.pack(inputs(grouping_.packed_places[row], count), count, k_, packed_ + use_.packed_floats(row, k_));
  }

  void multiply(const ExpertMatrix& m, float* y, const Grouping::Group& group, const Range& rows, const Range& cols) {
    MatmulTile tile{nullptr, y + group.begin * m.w.n, m.w.n, rows.begin, rows.end, cols.begin, cols.end};
    if (is_tiled(m.w.format)) {
      use_.tile_matmul(m.of(group.expert), integers(group.begin), digits_, tile);
    } else if (!group.is_few()) {
      copied_ = nullptr;
      use_.matmul_panel(m.of(group.expert), tile, packed_ + use_.packed_floats(group.packed, k_), own_);
    } else {
      if (copied_ != &group) copy_ = inputs(group.begin, group.count);
      copied_ = &group;
      tile.x = copy_;
      for (; tile.row_begin < rows.end; tile.row_begin = tile.row_end) {
        tile.row_end = std::min(tile.row_begin + kMaxDirectRows, rows.end);
        use_.matmul_direct(m.of(group.expert), tile);
      }
    }
    if (!m.bias) return;
    const float* bias = m.bias + group.expert * m.w.n + cols.begin;
    for (long row = rows.begin; row < rows.end; ++row)
      use_.add_scaled(tile.y + row * m.w.n + cols.begin, bias, 1, cols.end - cols.begin);
  }

  long step(const Grouping::Group& group) const {
    return group.is_few() ? kColumns : to_tiles_ ? kTileColumns : use_.panel_cols;
  }
  static long parts(const Grouping::Group& group) {
    return group.is_few() ? 1 : (group.count + kPartRows - 1) / kPartRows;
  }
  long units(const Grouping::Group& group, long n) const {
    return (n + step(group) - 1) / step(group) * parts(group);
  }

  // Calls body(group, rows, cols) for rectangles that cover n columns for all rows of all groups.
  template <class Body>
  void columns(long n, Body&& body) {
    long total = 0;
    for (const Grouping::Group& group : grouping_.groups) total += units(group, n);
    share_(total, [&](long begin, long end) {
      long first = 0;
      for (const Grouping::Group& group : grouping_.groups) {
        long count = units(group, n), width = step(group), rows = parts(group);
        long from = std::max(begin - first, 0L), to = std::min(end - first, count);
        first += count;
        if (from >= to) continue;
        if (group.is_few()) {
          body(group, Range{0, group.count}, Range{from * width, std::min(to * width, n)});
          continue;
        }
        for (long unit = from; unit < to; ++unit) {
          long col = unit / rows * width, row = unit % rows * kPartRows;
          body(group, Range{row, std::min(row + kPartRows, group.count)}, Range{col, std::min(col + width, n)});
        }
      }
    });
  }

  const Grouping& grouping_;
  const Kernels& use_;
  float* const own_;
  Share share_;

  const long digits_ = num_digits();

  const float* x_ = nullptr;
  long k_ = 0;
  Order order_ = Order::rows;
  float* packed_ = nullptr;
  bool to_tiles_ = false;
  const Grouping::Group* copied_ = nullptr;  // whose inputs are at copy_
  const float* copy_ = nullptr;
};

}  // namespace mlxserve
