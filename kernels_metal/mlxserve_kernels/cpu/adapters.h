// Low-rank changes of products that differ from row to row. What they mean: see mlxserve_kernels/adapters.py.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "decoder.h"
#include "isa.h"
#include "kernels.h"

namespace mlxserve {

// The changes of each slot at each site: a site is a product that slots may change.
struct LowRankTable {
  LowRankTable(long slots, long sites) : slots(slots), sites(sites), changes(slots * sites) {}

  // Null where the slot leaves the site as it is.
  const LowRank* at(long slot, long site) const {
    const LowRank& found = changes[slot * sites + site];
    return found.rank ? &found : nullptr;
  }
  void set(long slot, long site, const LowRank& change) {
    changes[slot * sites + site] = change;
    max_rank = std::max(max_rank, change.rank);
  }

  long slots, sites, max_rank = 0;
  std::vector<LowRank> changes;
};

// The changes of the rows of a call, and what its threads share of them: x @ a of each row. That is a sum of pieces of
// x, one after the other, with few rows too, where the pieces are work that threads share out. So a row has one order
// of sums.
class RowChanges {
 public:
  RowChanges() = default;  // none

  // slots [rows], each -1 or a slot of the table.
  RowChanges(const LowRankTable& table, const int* slots, long rows);

  // Floats that the threads share, and that each needs for itself.
  std::size_t shared_floats() const;
  std::size_t own_floats() const;
  // `shared` outlives the use of this.
  void place(float* shared) { inner_ = shared; }

  bool any() const { return table_; }
  bool is_few() const { return rows_ <= kMaxDirectRows; }

  // x @ a at a site, where rows are few: the number of units of work, and a range of them for x [rows, k].
  long units(long site) const;
  void multiply(long site, long begin, long end, const float* x) const;

  // The same for `count` rows of many; x is their first one.
  void multiply_rows(long site, long row, long count, const float* x, float* own) const;

  // Adds their changes to a rectangle of y, which has the columns of the site's product.
  void add(long site, const MatmulTile& y, float* own) const;

 private:
  static constexpr long kPieces = 16;  // of an input at most
  static constexpr long kLeastPiece = 64;
  static constexpr long kGroup = 7;    // sites whose inner products are held at the same time

  static long piece(long k) { return std::max(((k + kPieces - 1) / kPieces + 15) / 16 * 16, kLeastPiece); }
  static long pieces(long k) { return (k + piece(k) - 1) / piece(k); }

  // Calls body(begin, end, change) for those of the rows that a site is changed for; they have one slot.
  template <class Body>
  void each(long site, long begin, long end, Body&& body) const {
    if (!table_ || site < 0) return;
    for (long next; begin < end; begin = next) {
      for (next = begin + 1; next < end && slots_[next] == slots_[begin];) ++next;
      if (slots_[begin] < 0) continue;
      if (const LowRank* change = table_->at(slots_[begin], site)) body(begin, next, *change);
    }
  }

  // Of each row its sum or, with few rows, its pieces.
  long row_floats() const { return table_->max_rank * (is_few() ? kPieces : 1); }
  float* inner(long site, long row) const { return inner_ + (site % kGroup * rows_ + row) * row_floats(); }

  // to [rank] = the sum of a row's pieces.
  static void sum(const LowRank& change, const float* pieces, float* to);

  const LowRankTable* table_ = nullptr;
  const int* slots_ = nullptr;
  long rows_ = 0;
  float* inner_ = nullptr;
};

// What the slots of calls of a stack stand for. Holds copies of the arrays. Immutable.
class Adapters {
 public:
  // A slot's change of a layer's projection: slot, layer, "q", "k", "v", "o", "gate", "up" or "down", a, b, scale.
  using Change = std::tuple<long, long, std::string, mx::array, mx::array, float>;

  // Throws std::invalid_argument where a change fits no projection of the stack.
  Adapters(std::shared_ptr<const DecoderStack> stack, long slots, const std::vector<Change>& changes);

  const std::shared_ptr<const DecoderStack> stack;
  const LowRankTable& table() const { return table_; }

 private:
  // The change without its data, and the site.
  std::pair<LowRank, long> check(const Change& change) const;

  LowRankTable table_;
  mx::array memory_;
};

}  // namespace mlxserve
