// An output head and the cross entropy of its logits, which are never held: a softmax over the vocabulary goes along
// with the largest logit so far, as in attention, and what comes back to the rows is its mean of the head's rows.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "mlx/ops.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"
#include "product.h"
#include "training_kernels.h"
#include "weight.h"

namespace mlxserve {
namespace {

constexpr long kTaskRows = kMaxColumnRows;  // rows that a task takes through the vocabulary
constexpr long kTokens = 384;               // of the vocabulary at a time

struct Head {
  Weight w;
  LogitShape logits;
};

// What is given for each row.
struct Rows {
  const float* hidden;
  const int* targets;
  const float* weights;
  std::vector<long> active;  // those with a weight
};

Rows rows_from(const mx::array& hidden, const mx::array& targets, const mx::array& weights) {
  return {hidden.data<float>(), targets.data<int>(), weights.data<float>(), {}};
}

void find_active(Rows& rows, long count, long vocabulary) {
  for (long row = 0; row < count; ++row) {
    if (rows.weights[row] == 0) continue;
    require(rows.targets[row] >= 0 && rows.targets[row] < vocabulary, "cross_entropy_head: target ", rows.targets[row],
            " of row ", row, ", the head has ", vocabulary, " rows");
    rows.active.push_back(row);
  }
}

// One task's rows, packed, and the memory it needs.
class Part {
 public:
  Part(const Head& head, const Rows& rows, long begin, long count, std::size_t more)
      : head_(head), rows_(rows), begin_(begin), count_(count), use_(kernels()) {
    const std::size_t packed = aligned(use_.packed_floats(count, head.w.k));
    const std::size_t kernel = aligned(std::max(use_.panel_floats(head.w.k), use_.columns_floats()));
    // A multiple of the row tile, so that the packed copy is whole.
    own_ = scratch(0, 2 * aligned(count * head.w.k) + packed + kernel + aligned(count * kTokens) + more);
    hidden_ = own_, packed_ = hidden_ + aligned(count * head.w.k), kernel_ = packed_ + packed;
    products_ = kernel_ + kernel, sums_ = products_ + aligned(count * kTokens), more_ = sums_ + aligned(count * head.w.k);
    for (long i = 0; i < count; ++i)
      std::memcpy(hidden_ + i * head.w.k, rows.hidden + row(i) * head.w.k, head.w.k * sizeof(float));
    use_.pack(hidden_, count, head.w.k, packed_);
  }

  long count() const { return count_; }
  long row(long i) const { return rows_.active[begin_ + i]; }
  long target(long i) const { return rows_.targets[row(i)]; }
  float weight(long i) const { return rows_.weights[row(i)]; }
  const float* hidden() const { return hidden_; }
  float* sums() const { return sums_; }
  float* more() const { return more_; }
  float* kernel_scratch() const { return kernel_; }

  // The rows times tokens begin to end - 1 of the head, [count][end - begin].
  float* multiply(long begin, long end) const {
    if (count_ <= kMaxDirectRows) {
      use_.matmul_direct(rows_of(head_.w, begin, end - begin),
                         {hidden_, products_, end - begin, 0, count_, 0, end - begin});
      return products_;
    }
    for (long col = 0; col < end - begin; col += use_.panel_cols)
      use_.matmul_panel(rows_of(head_.w, begin, end - begin),
                        {nullptr, products_, end - begin, 0, count_, col, std::min(col + use_.panel_cols, end - begin)},
                        packed_, kernel_);
    return products_;
  }

  // sums [count][K] (+)= values [count][end - begin] times these rows of the head.
  void add_rows(const float* values, long begin, long end, bool is_first) const {
    const Weight w = rows_of(head_.w, begin, end - begin);
    float* to = is_first ? sums_ : more_;
    for (long col = 0; col < w.k; col += kColumns)
      use_.matmul_columns(w,
                          {values, Format::float32, false, w.n, to, Format::float32, w.k, 0, count_, col,
                           std::min(col + kColumns, w.k)},
                          kernel_);
    if (!is_first) use_.add_scaled(sums_, more_, 1, count_ * w.k);
  }

 private:
  const Head& head_;
  const Rows& rows_;
  long begin_, count_;
  const Kernels& use_;
  float *own_, *hidden_, *packed_, *kernel_, *products_, *sums_, *more_;
};

// Rows of a task: all alike, and more than one task a thread where there are rows for it.
long task_rows(long rows) {
  const long share = (rows + 2L * num_threads() - 1) / (2L * num_threads());
  return std::clamp(round_up(share, 16), 16L, kTaskRows);
}

float scaled(const LogitShape& shape, float product, float& slope) {
  const float logit = product * shape.scale;
  slope = shape.scale;
  if (shape.softcap == 0) return logit;
  const float bent = std::tanh(logit / shape.softcap);
  slope *= 1 - bent * bent;
  return bent * shape.softcap;
}

struct Results {
  float* log_sums;
  float* d_hidden;  // null where not wanted
  double* losses;   // of each row
};

void lose(const Head& head, const Rows& rows, long begin, long count, const Results& to) {
  const TrainingKernels& training = *kernels().training;
  const long k = head.w.k;
  Part part(head, rows, begin, count, aligned(count * k));
  float tops[kTaskRows], logits[kTaskRows], slopes[kTaskRows];
  double totals[kTaskRows];
  for (long i = 0; i < count; ++i) tops[i] = -INFINITY, totals[i] = 0;
  for (long first = 0; first < head.w.n; first += kTokens) {
    const long end = std::min(first + kTokens, head.w.n), size = end - first;
    float* products = part.multiply(first, end);
    for (long i = 0; i < count; ++i) {
      float* row = products + i * size;
      if (const long at = part.target(i) - first; at >= 0 && at < size) logits[i] = scaled(head.logits, row[at], slopes[i]);
      const float factor = training.take_logits(head.logits, row, size, tops[i], totals[i]);
      if (to.d_hidden && factor != 1 && first) {
        float* sums = part.sums() + i * k;
        for (long j = 0; j < k; ++j) sums[j] *= factor;
      }
    }
    if (to.d_hidden) part.add_rows(products, first, end, first == 0);
  }
  for (long i = 0; i < count; ++i) {
    const double log_sum = tops[i] + std::log(totals[i]);
    to.log_sums[part.row(i)] = float(log_sum);
    to.losses[begin + i] = part.weight(i) * (log_sum - logits[i]);
    if (!to.d_hidden) continue;
    float *target = part.more(), *out = to.d_hidden + part.row(i) * k;
    kernels().read_row(head.w, part.target(i), target);
    std::memset(out, 0, k * sizeof(float));
    kernels().add_scaled(out, part.sums() + i * k, float(part.weight(i) / totals[i]), k);
    kernels().add_scaled(out, target, -part.weight(i) * slopes[i], k);
  }
}

// The gradient of tokens first to end - 1 of a dense head: for all rows, a part of them at a time.
void weight_gradient(const Head& head, const Rows& rows, const float* log_sums, float factor, long first, long end,
                     float* d_w) {
  const Kernels& use = kernels();
  const long size = end - first, k = head.w.k, total = long(rows.active.size());
  std::memset(d_w + first * k, 0, size * k * sizeof(float));
  for (long begin = 0; begin < total; begin += kTaskRows) {
    const long count = std::min(kTaskRows, total - begin);
    Part part(head, rows, begin, count, aligned(kMaxColumnRows * k));
    float* products = part.multiply(first, end);
    for (long i = 0; i < count; ++i) {
      const long at = part.target(i) - first;
      use.training->logit_gradient(head.logits, products + i * size, size, log_sums[part.row(i)],
                                   at >= 0 && at < size ? at : -1, part.weight(i) * factor);
    }
    const Weight hidden{Format::float32, count, k, part.hidden(), 0, Format::float32, nullptr, nullptr};
    for (long row = 0; row < size; row += kMaxColumnRows) {
      const long height = std::min(kMaxColumnRows, size - row);
      for (long col = 0; col < k; col += kColumns)
        use.matmul_columns(hidden,
                           {products + row, Format::float32, true, size, part.more(), Format::float32, k, 0, height, col,
                            std::min(col + kColumns, k)},
                           part.kernel_scratch());
      use.add_scaled(d_w + (first + row) * k, part.more(), 1, height * k);
    }
  }
}

struct Inputs {
  Head head;
  Rows rows;
  long count;
};

// inputs: hidden, targets, weights, w and, of quantized formats, scales and, of affine ones, biases.
Inputs take(const std::vector<mx::array>& inputs, const Head& shape, mx::cpu::CommandEncoder& encoder,
            std::size_t parts) {
  Inputs all{shape, rows_from(dense(inputs[0], encoder), dense(inputs[1], encoder), dense(inputs[2], encoder)),
             inputs[0].shape(0)};
  all.head.w.data = dense(inputs[3], encoder).data<char>();
  if (parts > 1) all.head.w.scales = dense(inputs[4], encoder).data<char>();
  if (parts > 2) all.head.w.biases = dense(inputs[5], encoder).data<char>();
  return all;
}

class HeadWeightGradient : public CpuPrimitive {
 public:
  HeadWeightGradient(mx::Stream stream, Head head) : CpuPrimitive(stream), head_(head) {}

  const char* name() const override { return "MlxserveHeadWeightGradient"; }

  // inputs: hidden, targets, weights, w, the logarithms of the sums, what comes back to the loss.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array log_sums = dense(inputs[4], encoder), factor = inputs[5];
    encoder.dispatch([all = take(inputs, head_, encoder, 1), sums = log_sums.data<float>(),
                      factor = factor.data<float>(), to = outputs[0].data<float>()]() mutable {
      find_active(all.rows, all.count, all.head.w.n);
      const long n = all.head.w.n;
      parallel_for((n + kTokens - 1) / kTokens, [&](long task) {
        weight_gradient(all.head, all.rows, sums, *factor, task * kTokens, std::min((task + 1) * kTokens, n), to);
      });
    });
  }

 private:
  Head head_;
};

class HeadLoss : public CpuPrimitive {
 public:
  HeadLoss(mx::Stream stream, Head head, std::size_t parts) : CpuPrimitive(stream), head_(head), parts_(parts) {}

  const char* name() const override { return "MlxserveHeadLoss"; }

  // outputs: the loss, the logarithms of the sums and, where it is wanted, what belongs to the rows.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (mx::array& out : outputs) allocate(out);
    encoder.dispatch([all = take(inputs, head_, encoder, parts_), loss = outputs[0].data<float>(),
                      log_sums = outputs[1].data<float>(),
                      d_hidden = outputs.size() > 2 ? outputs[2].data<float>() : nullptr]() mutable {
      find_active(all.rows, all.count, all.head.w.n);
      std::memset(log_sums, 0, all.count * sizeof(float));
      if (d_hidden) std::memset(d_hidden, 0, all.count * all.head.w.k * sizeof(float));
      const long total = long(all.rows.active.size()), step = task_rows(total);
      std::vector<double> losses(total);
      parallel_for((total + step - 1) / step, [&](long task) {
        lose(all.head, all.rows, task * step, std::min(step, total - task * step), {log_sums, d_hidden, losses.data()});
      });
      double sum = 0;
      for (double each : losses) sum += each;
      *loss = float(sum);
    });
  }

  // For the rows, and for the head where it is dense.
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>& outputs) override {
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      require(argnum == 0 || argnum == 3, "cross_entropy_head: there is no gradient of targets and weights");
      if (argnum == 0) {
        require(outputs.size() > 2, "cross_entropy_head: it was called with with_gradient=False");
        gradients.push_back(mx::multiply(outputs[2], cotangents[0], stream()));
        continue;
      }
      require(parts_ == 1, "cross_entropy_head: there is no gradient of quantized weights");
      std::vector<mx::array> inputs(primals.begin(), primals.begin() + 4);
      inputs.insert(inputs.end(), {outputs[1], cotangents[0]});
      mx::array d_w(primals[3].shape(), mx::float32, std::make_shared<HeadWeightGradient>(stream(), head_), inputs);
      gradients.push_back(mx::astype(d_w, primals[3].dtype(), stream()));
    }
    return gradients;
  }

 private:
  Head head_;
  std::size_t parts_;
};

}  // namespace

mx::array cross_entropy_head(const mx::array& hidden, const mx::array& targets, const mx::array& weights,
                             const mx::array& w, const std::optional<mx::array>& scales,
                             const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode,
                             float logit_scale, float softcap, bool with_gradient) {
  const char* op = "cross_entropy_head";
  std::vector<mx::array> inputs{hidden, targets, weights, w};
  Head head{};
  if (scales) {
    head.w = quantized_shape(op, w, *scales, biases, group_size, bits, mode);
    inputs.push_back(*scales);
    if (biases) inputs.push_back(*biases);
  } else {
    format_of(w, op, "w");
  }
  require(w.ndim() == 2 && w.shape(0) > 0, op, ": w must be [V, K], got ", w.ndim(), " dimensions");
  if (!scales) head.w = dense_weight(w);
  require(hidden.dtype() == mx::float32 && hidden.ndim() == 2 && hidden.shape(1) == head.w.k && head.w.k > 0, op,
          ": hidden must be float32 [T, ", head.w.k, "]");
  const mx::Shape rows{hidden.shape(0)};
  require(targets.dtype() == mx::int32 && targets.shape() == rows, op, ": targets must be int32 [", rows[0], "]");
  require(weights.dtype() == mx::float32 && weights.shape() == rows, op, ": weights must be float32 [", rows[0], "]");
  require(softcap >= 0, op, ": softcap must not be negative");
  head.logits = {logit_scale, softcap};
  std::vector<mx::Shape> shapes{{}, rows};
  if (with_gradient) shapes.push_back(hidden.shape());
  auto primitive = std::make_shared<HeadLoss>(cpu_stream(), head, inputs.size() - 3);
  return mx::array::make_arrays(shapes, std::vector<mx::Dtype>(shapes.size(), mx::float32), std::move(primitive),
                                inputs)[0];
}

}  // namespace mlxserve
