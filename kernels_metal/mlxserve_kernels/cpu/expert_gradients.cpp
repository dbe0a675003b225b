#include "expert_gradients.h"

#include <algorithm>
#include <cstring>

#include "experts.h"
#include "isa.h"
#include "pool.h"
#include "primitive.h"
#include "room.h"

namespace mlxserve {
namespace {

struct Rectangle {
  long expert, begin, count;  // places of the group
  long row, row_end, col, col_end;
};

// Rectangles of `rows(group)` rows and `width` columns for each group.
template <class RowsOf>
std::vector<Rectangle> rectangles(const Grouping& grouping, long width, RowsOf&& rows_of_group) {
  std::vector<Rectangle> all;
  for (const Grouping::Group& group : grouping.groups) {
    const long rows = rows_of_group(group);
    for (long row = 0; row < rows; row += kMaxColumnRows)
      for (long col = 0; col < width; col += kColumns)
        all.push_back({group.expert, group.begin, group.count, row, std::min(row + kMaxColumnRows, rows), col,
                       std::min(col + kColumns, width)});
  }
  return all;
}

Grouping grouped(const int* ids, long pairs, long experts) {
  Grouping grouping(pairs, 1, experts);
  for (long pair = 0; pair < pairs; ++pair)
    require(ids[pair] >= 0 && ids[pair] < experts, "gather_matmul: id ", ids[pair], " at ", pair, ", there are ",
            experts, " experts");
  grouping.sort(ids);
  return grouping;
}

// Rows in the order of their places.
void put_in_places(const Grouping& grouping, const float* rows, long width, float* to) {
  parallel_for(long(grouping.pairs.size()), [&](long place) {
    std::memcpy(to + place * width, rows + grouping.pairs[place] * width, width * sizeof(float));
  });
}

class GatherColumns : public CpuPrimitive {
 public:
  GatherColumns(mx::Stream stream, const Weight& shape, long experts)
      : CpuPrimitive(stream), shape_(shape), experts_(experts) {}

  const char* name() const override { return "MlxserveGatherColumns"; }

  // inputs: d_y, ids, the arrays of the weights.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    ExpertMatrix m{shape_, nullptr};
    m.w.data = dense(inputs[2], encoder).data<char>();
    if (inputs.size() > 3) m.w.scales = dense(inputs[3], encoder).data<char>();
    if (inputs.size() > 4) m.w.biases = dense(inputs[4], encoder).data<char>();
    mx::array d_y = dense(inputs[0], encoder), ids = dense(inputs[1], encoder);
    encoder.dispatch([m, experts = experts_, from = d_y.data<float>(), at = ids.data<int>(), pairs = long(ids.size()),
                      to = outputs[0].data<float>()] { run(m, experts, from, at, pairs, to); });
  }

 private:
  static void run(const ExpertMatrix& m, long experts, const float* d_y, const int* ids, long pairs, float* to) {
    const long n = m.w.n, k = m.w.k;
    const Grouping grouping = grouped(ids, pairs, experts);
    Room room(pairs * (n + k));
    float *rows = room.take(pairs * n), *sums = room.take(pairs * k);
    put_in_places(grouping, d_y, n, rows);
    const auto parts = rectangles(grouping, k, [](const Grouping::Group& group) { return group.count; });
    parallel_for(long(parts.size()), [&](long task) {
      const Rectangle& r = parts[task];
      kernels().matmul_columns(m.of(r.expert),
                               {rows + r.begin * n, Format::float32, false, n, sums + r.begin * k, Format::float32, k,
                                r.row, r.row_end, r.col, r.col_end},
                               scratch(0, kernels().columns_floats()));
    });
    parallel_for(pairs, [&](long pair) {
      std::memcpy(to + pair * k, sums + grouping.places[pair] * k, k * sizeof(float));
    });
  }

  Weight shape_;
  long experts_;
};

class ExpertWeightGradient : public CpuPrimitive {
 public:
  ExpertWeightGradient(mx::Stream stream, long experts) : CpuPrimitive(stream), experts_(experts) {}

  const char* name() const override { return "MlxserveExpertWeightGradient"; }

  // inputs: d_y, x, ids.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array d_y = dense(inputs[0], encoder), x = dense(inputs[1], encoder), ids = dense(inputs[2], encoder);
    encoder.dispatch([experts = experts_, back = d_y.data<float>(), from = x.data<float>(), at = ids.data<int>(),
                      pairs = long(ids.size()), n = long(d_y.shape(1)), k = long(x.shape(1)),
                      to = outputs[0].data<float>()] { run(experts, back, from, at, pairs, n, k, to); });
  }

 private:
  static void run(long experts, const float* d_y, const float* x, const int* ids, long pairs, long n, long k,
                  float* to) {
    const Grouping grouping = grouped(ids, pairs, experts);
    Room room(pairs * (n + k));
    float *back = room.take(pairs * n), *rows = room.take(pairs * k);
    put_in_places(grouping, d_y, n, back);
    put_in_places(grouping, x, k, rows);
    // Experts without rows have none of it.
    std::memset(to, 0, experts * n * k * sizeof(float));
    const auto parts = rectangles(grouping, k, [n](const Grouping::Group&) { return n; });
    parallel_for(long(parts.size()), [&](long task) {
      const Rectangle& r = parts[task];
      const Weight w{Format::float32, r.count, k, rows + r.begin * k, 0, Format::float32, nullptr, nullptr};
      kernels().matmul_columns(w,
                               {back + r.begin * n, Format::float32, true, n, to + r.expert * n * k, Format::float32, k,
                                r.row, r.row_end, r.col, r.col_end},
                               scratch(0, kernels().columns_floats()));
    });
  }

  long experts_;
};

}  // namespace

mx::array gather_columns(const mx::array& d_y, const mx::array& ids, const std::vector<mx::array>& weights,
                         const Weight& shape, long experts) {
  mx::Shape out = d_y.shape();
  out.back() = static_cast<mx::ShapeElem>(shape.k);
  std::vector<mx::array> inputs{d_y, ids};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  return mx::array(std::move(out), mx::float32, std::make_shared<GatherColumns>(cpu_stream(), shape, experts),
                   std::move(inputs));
}

mx::array expert_weight_gradient(const mx::array& d_y, const mx::array& x, const mx::array& ids, long experts) {
  mx::Shape out{static_cast<mx::ShapeElem>(experts), d_y.shape(1), x.shape(1)};
  return mx::array(std::move(out), mx::float32, std::make_shared<ExpertWeightGradient>(cpu_stream(), experts),
                   {d_y, x, ids});
}

}  // namespace mlxserve
