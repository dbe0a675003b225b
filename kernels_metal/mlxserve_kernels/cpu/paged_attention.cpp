#include <algorithm>
#include <cstring>

#include "attention_plan.h"
#include "floats.h"
#include "isa.h"
#include "kv_pool.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"

namespace mlxserve {
namespace {

void attend_by_split(const AttentionCall& call, const std::vector<AttentionItem>& items, std::size_t scratch_floats) {
  const Kernels& use = kernels();
  struct Task {
    long item, split;
    std::size_t offset;
  };
  std::vector<Task> tasks;
  std::vector<std::size_t> offsets;
  std::size_t floats = 0;
  for (long i = 0; i < long(items.size()); ++i) {
    offsets.push_back(floats);
    for (long split = 0; split < call.num_splits(items[i]); ++split) {
      tasks.push_back({i, call.first_split(items[i]) + split, floats});
      floats += use.partial_floats(call.a, items[i].num_rows);
    }
  }
  float* partials = scratch(1, floats);
  parallel_for(long(tasks.size()), [&](long i) {
    const Task& task = tasks[i];
    use.attend_split(call.a, items[task.item], task.split, partials + task.offset, scratch(0, scratch_floats));
  });
  parallel_for(long(items.size()), [&](long i) {
    use.attend_merge(call.a, items[i], partials + offsets[i], scratch(0, scratch_floats));
  });
}

void attend(const AttentionCall& call) {
  check_attention(call);
  const Kernels& use = kernels();
  long covered = call.q_starts[call.sequences], row_floats = call.a.heads * call.a.value_dim;
  std::memset(call.a.out + covered * row_floats, 0, (call.rows - covered) * row_floats * sizeof(float));
  std::vector<AttentionItem> items = attention_items(call);
  long max_rows = 0;
  bool has_splits = false;
  for (const AttentionItem& item : items) {
    max_rows = std::max(max_rows, item.num_rows);
    has_splits |= call.num_splits(item) > 1;
  }
  std::size_t floats = use.attention_scratch_floats(call.a, max_rows);
  if (has_splits && long(items.size()) < 8L * num_threads()) return attend_by_split(call, items, floats);
  parallel_for(long(items.size()), [&](long i) { use.attend_whole(call.a, items[i], scratch(0, floats)); });
}

class PagedAttention : public CpuPrimitive {
 public:
  PagedAttention(mx::Stream stream, Attention parameters) : CpuPrimitive(stream), parameters_(parameters) {}

  const char* name() const override { return "MlxservePagedAttention"; }

  // inputs: q, k_pool, v_pool, block_tables, q_starts, kv_lens and perhaps sinks.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    for (int i : {1, 2}) require(inputs[i].flags().row_contiguous, "paged_attention: a pool must be contiguous");
    std::vector<mx::array> in;
    for (const mx::array& input : inputs) in.push_back(dense(input, encoder));
    AttentionCall call{parameters_, in[0].shape(0), in[5].shape(0), in[1].shape(0), in[4].data<int>(), in[5].data<int>()};
    call.a.keys = in[1].data<char>(), call.a.values = in[2].data<char>();
    call.a.block_tables = in[3].data<int>();
    call.a.sinks = in.size() > 6 ? in[6].data<float>() : nullptr;
    Input q = input_rows(in[0], call.a.heads * call.a.dim);
    Output out = output_rows(outputs[0], call.a.heads * call.a.value_dim);
    encoder.dispatch([call, q, out]() mutable {
      // All rows at once: those of a sequence stay together.
      auto run = [&](const float* from, float* to, long, long) {
        call.a.q = from, call.a.out = to;
        attend(call);
      };
      in_floats(q, out, call.rows, run, 2, call.rows);
    });
  }

 private:
  Attention parameters_;
};

}  // namespace

mx::array paged_attention(const mx::array& q, const mx::array& k_pool, const mx::array& v_pool,
                          const mx::array& block_tables, const mx::array& q_starts, const mx::array& kv_lens,
                          float scale, int window, float softcap, const std::optional<mx::array>& sinks,
                          int kv_bits) {
  const char* op = "paged_attention";
  format_of(q, op, "q");
  require(q.ndim() == 3, op, ": q must be [T, H, D]");
  auto [keys, values] = kv_pools(op, k_pool, v_pool, kv_bits, q.shape(2), 0);
  require(keys.dim == q.shape(2), op, ": q has D of ", q.shape(2), ", k_pool ", keys.dim);
  require(keys.heads > 0 && keys.page > 0 && values.dim > 0, op, ": a pool has an empty axis");
  require(q.shape(1) > 0 && q.shape(1) % keys.heads == 0, op, ": H must be a multiple of H_kv ", keys.heads, ", got ",
          q.shape(1));
  require(kv_lens.dtype() == mx::int32 && kv_lens.ndim() == 1, op, ": kv_lens must be int32 [S]");
  require(q_starts.dtype() == mx::int32 && q_starts.ndim() == 1 && q_starts.shape(0) == kv_lens.shape(0) + 1, op,
          ": q_starts must be int32 [", kv_lens.shape(0) + 1, "]");
  require(block_tables.dtype() == mx::int32 && block_tables.ndim() == 2 && block_tables.shape(0) == kv_lens.shape(0),
          op, ": block_tables must be int32 [", kv_lens.shape(0), ", max_pages]");
  require(window >= 0, op, ": window must be positive, got ", window);
  require(softcap >= 0, op, ": softcap must be positive, got ", softcap);
  Attention a{};
  a.format = keys.format;
  a.max_pages = block_tables.shape(1);
  a.heads = q.shape(1), a.kv_heads = keys.heads, a.page = keys.page;
  a.dim = keys.dim, a.value_dim = values.dim;
  a.scale = scale, a.window = window, a.softcap = softcap;
  std::vector<mx::array> inputs{q, k_pool, v_pool, block_tables, q_starts, kv_lens};
  if (sinks) {
    require(sinks->dtype() == mx::float32 && sinks->ndim() == 1 && sinks->shape(0) == q.shape(1), op,
            ": sinks must be float32 [", q.shape(1), "]");
    inputs.push_back(*sinks);
  }
  mx::Shape shape{q.shape(0), q.shape(1), static_cast<mx::ShapeElem>(values.dim)};
  return mx::array(std::move(shape), q.dtype(), std::make_shared<PagedAttention>(cpu_stream(), a),
                   std::move(inputs));
}

}  // namespace mlxserve
