// The changes that adapters make, as an operation of their own.
#include <algorithm>
#include <cstring>

#include "adapters.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"
#include "team.h"

namespace mlxserve {
namespace {

constexpr long kColumns = 64;  // columns and rows of a unit of work
constexpr long kRows = 64;

// y [rows, n] = the changes of x [rows, k].
void lora_delta(const LowRankTable& table, const int* slots, const float* x, long rows, long k, float* y, long n) {
  for (long row = 0; row < rows; ++row)
    require(slots[row] >= -1 && slots[row] < table.slots, "lora_delta: slots[", row, "] is ", slots[row],
            ", there are ", table.slots, " adapters");
  RowChanges changes(table, slots, rows);
  changes.place(scratch(2, changes.shared_floats()));
  const long tiles = (rows + kMaxDirectRows - 1) / kMaxDirectRows;
  const long columns = (n + kColumns - 1) / kColumns, parts = (rows + kRows - 1) / kRows;
  Team team(2);
  parallel_for(num_threads(), [&](long) {
    float* own = scratch(0, changes.own_floats());
    const long units = changes.is_few() ? changes.units(0) : tiles;
    team.share(0, units, units, [&](long begin, long end) {
      if (changes.is_few()) return changes.multiply(0, begin, end, x);
      for (long row = begin * kMaxDirectRows; row < std::min(end * kMaxDirectRows, rows); row += kMaxDirectRows)
        changes.multiply_rows(0, row, std::min(kMaxDirectRows, rows - row), x + row * k, own);
    });
    team.share(1, columns * parts, 1, [&](long unit, long) {
      const long col = unit / parts * kColumns, row = unit % parts * kRows;
      MatmulTile tile{nullptr, y, n, row, std::min(row + kRows, rows), col, std::min(col + kColumns, n)};
      for (long at = tile.row_begin; at < tile.row_end; ++at)
        std::memset(y + at * n + col, 0, (tile.col_end - col) * sizeof(float));
      changes.add(0, tile, own);
    });
  });
}

class LoraDelta : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  const char* name() const override { return "MlxserveLoraDelta"; }

  // inputs: x, a, b, slots, scales.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array x = dense(inputs[0], encoder), a = dense(inputs[1], encoder), b = dense(inputs[2], encoder);
    mx::array slots = dense(inputs[3], encoder), scales = dense(inputs[4], encoder);
    const long rows = x.shape(0), k = x.shape(1), count = a.shape(0), rank = a.shape(2), n = b.shape(2);
    const long size = long(a.itemsize());
    LowRank change{format_of(a, "lora_delta", "a"), k, n, rank, a.data<char>(), b.data<char>(), n, 0};
    encoder.dispatch([=, ids = slots.data<int>(), factors = scales.data<float>(), from = x.data<float>(),
                      to = outputs[0].data<float>()]() {
      LowRankTable table(count, 1);
      for (long slot = 0; slot < count; ++slot) {
        LowRank each = change;
        each.a = static_cast<const char*>(change.a) + slot * k * rank * size;
        each.b = static_cast<const char*>(change.b) + slot * rank * n * size;
        each.scale = factors[slot];
        table.set(slot, 0, each);
      }
      lora_delta(table, ids, from, rows, k, to, n);
    });
  }
};

}  // namespace

mx::array lora_delta(const mx::array& x, const mx::array& a, const mx::array& b, const mx::array& slots,
                     const mx::array& scales) {
  const char* op = "lora_delta";
  require(x.dtype() == mx::float32 && x.ndim() == 2 && x.shape(1) > 0, op, ": x must be float32 [T, K]");
  require(a.ndim() == 3 && b.ndim() == 3 && a.shape(0) == b.shape(0) && a.shape(1) == x.shape(1) &&
              a.shape(2) == b.shape(1),
          op, ": a must be [S, ", x.shape(1), ", R] and b [S, R, N], got ", a.shape(), " and ", b.shape());
  format_of(a, op, "a");
  require(a.dtype() == b.dtype(), op, ": a and b must have one dtype, got ", a.dtype(), " and ", b.dtype());
  require(slots.dtype() == mx::int32 && slots.ndim() == 1 && slots.shape(0) == x.shape(0), op,
          ": slots must be int32 [", x.shape(0), "]");
  require(scales.dtype() == mx::float32 && scales.ndim() == 1 && scales.shape(0) == a.shape(0), op,
          ": scales must be float32 [", a.shape(0), "]");
  return mx::array({x.shape(0), b.shape(2)}, mx::float32, std::make_shared<LoraDelta>(cpu_stream()),
                   {x, a, b, slots, scales});
}

}  // namespace mlxserve
