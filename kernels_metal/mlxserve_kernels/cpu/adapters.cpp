#include "adapters.h"

#include <cstring>

#include "primitive.h"

namespace mlxserve {
namespace {

// Columns of a panel of b: read from end to end, while those of a row-major b are many short reads, each a miss.
constexpr long kPanel = 64;
constexpr int kLine = 64;  // bytes of a cache line

// The change of a product with k inputs and n outputs, without its data.
LowRank low_rank(const char* op, const std::string& name, const mx::array& a, const mx::array& b, float scale, long k,
                 long n) {
  Format format = format_of(a, op, "a");
  require(a.dtype() == b.dtype(), op, ": ", name, ": a and b must have one dtype, got ", a.dtype(), " and ", b.dtype());
  require(a.ndim() == 2 && b.ndim() == 2 && a.shape(0) == k && b.shape(1) == n && a.shape(1) == b.shape(0) &&
              a.shape(1) > 0,
          op, ": ", name, ": a must be [", k, ", R] and b [R, ", n, "], got ", a.shape(), " and ", b.shape());
  return {format, k, n, a.shape(1), nullptr, nullptr, kPanel, scale};
}

// b [rank, n] in panels.
void copy_panels(const LowRank& change, const char* b, std::size_t item, char* to) {
  for (long first = 0; first < change.n; first += change.panel) {
    const std::size_t width = std::min(change.panel, change.n - first) * item;
    for (long row = 0; row < change.rank; ++row, to += width)
      std::memcpy(to, b + (row * change.n + first) * item, width);
  }
}

}  // namespace

RowChanges::RowChanges(const LowRankTable& table, const int* slots, long rows) : slots_(slots), rows_(rows) {
  if (table.max_rank && std::any_of(slots, slots + rows, [](int slot) { return slot >= 0; })) table_ = &table;
}

std::size_t RowChanges::shared_floats() const {
  return table_ ? std::min(kGroup, table_->sites) * rows_ * row_floats() : 0;
}

std::size_t RowChanges::own_floats() const {
  return table_ ? table_->max_rank * kMaxDirectRows * (is_few() ? 1 : kPieces) : 0;
}

long RowChanges::units(long site) const {
  long total = 0;
  each(site, 0, rows_, [&](long, long, const LowRank& change) { total += pieces(change.k); });
  return total;
}

void RowChanges::multiply(long site, long begin, long end, const float* x) const {
  long first = 0;
  each(site, 0, rows_, [&](long row, long end_row, const LowRank& change) {
    long count = pieces(change.k), size = piece(change.k);
    for (long i = std::max(begin - first, 0L); i < std::min(end - first, count); ++i)
      kernels().low_rank_inner(change, x + row * change.k, end_row - row, i * size, std::min((i + 1) * size, change.k),
                               inner(site, row) + i * change.rank, row_floats());
    first += count;
  });
}

void RowChanges::multiply_rows(long site, long row, long count, const float* x, float* own) const {
  each(site, row, row + count, [&](long begin, long end, const LowRank& change) {
    const long size = piece(change.k), ld = pieces(change.k) * change.rank;
    for (; begin < end; begin += kMaxDirectRows) {
      long rows = std::min(kMaxDirectRows, end - begin);
      for (long i = 0; i < pieces(change.k); ++i)
        kernels().low_rank_inner(change, x + (begin - row) * change.k, rows, i * size,
                                 std::min((i + 1) * size, change.k), own + i * change.rank, ld);
      for (long each = 0; each < rows; ++each) sum(change, own + each * ld, inner(site, begin + each));
    }
  });
}

void RowChanges::add(long site, const MatmulTile& y, float* own) const {
  each(site, y.row_begin, y.row_end, [&](long begin, long end, const LowRank& change) {
    const float* from = inner(site, begin);
    if (is_few())
      for (long row = begin; row < end; ++row) sum(change, inner(site, row), own + (row - begin) * change.rank);
    MatmulTile tile = y;
    tile.row_begin = begin, tile.row_end = end;
    kernels().low_rank_change(change, is_few() ? own : from, is_few() ? change.rank : row_floats(), tile);
  });
}

void RowChanges::sum(const LowRank& change, const float* from, float* to) {
  std::memcpy(to, from, change.rank * sizeof(float));
  for (long i = 1; i < pieces(change.k); ++i) kernels().add_scaled(to, from + i * change.rank, 1, change.rank);
}

Adapters::Adapters(std::shared_ptr<const DecoderStack> of, long slots, const std::vector<Change>& changes)
    : stack(std::move(of)), table_(slots, long(stack->layers.size()) * kProjections), memory_(mx::array(0)) {
  std::size_t size = 0;
  for (const Change& change : changes) {
    check(change);
    size += round_up(std::get<3>(change).nbytes(), kLine) + round_up(std::get<4>(change).nbytes(), kLine);
  }
  memory_ = placed({static_cast<mx::ShapeElem>(size / kLine), kLine}, mx::uint8);
  char* next = memory_.data<char>();
  for (const Change& change : changes) {
    auto [low_rank, site] = check(change);
    mx::array a = ready(std::get<3>(change)), b = ready(std::get<4>(change));
    low_rank.a = next;
    std::memcpy(next, a.data<char>(), a.nbytes());
    next += round_up(a.nbytes(), kLine);
    low_rank.b = next;
    copy_panels(low_rank, b.data<char>(), b.itemsize(), next);
    next += round_up(b.nbytes(), kLine);
    table_.set(std::get<0>(change), site, low_rank);
  }
}

std::pair<LowRank, long> Adapters::check(const Change& change) const {
  const char* op = "Adapters";
  const auto& [slot, layer, part, a, b, scale] = change;
  require(slot >= 0 && slot < table_.slots, op, ": slot must be 0 to ", table_.slots - 1, ", got ", slot);
  require(layer >= 0 && layer < long(stack->layers.size()), op, ": layer must be 0 to ", stack->layers.size() - 1,
          ", got ", layer);
  const DecoderLayer& l = stack->layers[layer];
  const Matrix* m = l.projection(part);
  std::string name = "layer " + std::to_string(layer) + ", " + part;
  bool is_of_experts = l.experts && (part == "gate" || part == "up" || part == "down");
  require(m, op, ": ", name, ": ",
          is_of_experts ? "adapters of experts are not supported" : "there is no such projection");
  return {low_rank(op, name, a, b, scale, m->w.k, m->w.n), m->site};
}

}  // namespace mlxserve
