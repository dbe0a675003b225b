#include <algorithm>
#include <cstring>

#include "isa.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"

namespace mlxserve {
namespace {

constexpr long kItemRows = 48;  // pairs of row and head that share each gathered block of keys and values

struct Call {
  Attention a;
  long rows, sequences, pages;
  const int *q_starts, *kv_lens;

  long num_keys(const AttentionItem& item) const { return item.first_position + item.num_rows; }
  long first_split(const AttentionItem& item) const {
    return a.window ? std::max(0L, item.first_position + 1 - a.window) / kSplit : 0;
  }
  long num_splits(const AttentionItem& item) const {
    return (num_keys(item) + kSplit - 1) / kSplit - first_split(item);
  }
};

void check(const Call& call) {
  const char* op = "paged_attention";
  require(call.q_starts[0] == 0, op, ": q_starts[0] must be 0, got ", call.q_starts[0]);
  for (long s = 0; s < call.sequences; ++s) {
    long rows = call.q_starts[s + 1] - call.q_starts[s], keys = call.kv_lens[s];
    require(rows >= 0 && call.q_starts[s + 1] <= call.rows, op, ": q_starts must ascend to at most ", call.rows,
            ", got ", call.q_starts[s + 1], " at ", s + 1);
    if (rows == 0) continue;
    require(keys >= rows && keys <= call.a.max_pages * call.a.page, op, ": kv_lens[", s, "] is ", keys,
            ", must be from its ", rows, " rows to the ", call.a.max_pages * call.a.page, " slots of its block table");
    // With a window, pages wholly behind it may have gone back to the pool.
    long first = call.a.window ? std::max(0L, keys - rows + 1 - call.a.window) : 0;
    for (long i = first / call.a.page; i * call.a.page < keys; ++i) {
      int page = call.a.block_tables[s * call.a.max_pages + i];
      require(page >= 0 && page < call.pages, op, ": block_tables[", s, ", ", i, "] is ", page, ", the pool has ",
              call.pages, " pages");
    }
  }
}

// Longest first, so that no thread starts a long one when the others are done.
std::vector<AttentionItem> items_of(const Call& call) {
  std::vector<AttentionItem> items;
  long step = std::max(1L, kItemRows / (call.a.heads / call.a.kv_heads));
  for (long s = 0; s < call.sequences; ++s) {
    long begin = call.q_starts[s], end = call.q_starts[s + 1];
    for (long row = begin; row < end; row += step)
      for (long head = 0; head < call.a.kv_heads; ++head)
        items.push_back({s, head, row, std::min(step, end - row), call.kv_lens[s] - (end - row)});
  }
  std::stable_sort(items.begin(), items.end(), [&](const AttentionItem& a, const AttentionItem& b) {
    return call.num_keys(a) * a.num_rows > call.num_keys(b) * b.num_rows;
  });
  return items;
}

void attend_by_split(const Call& call, const std::vector<AttentionItem>& items, std::size_t scratch_floats) {
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

void attend(const Call& call) {
  check(call);
  const Kernels& use = kernels();
  long covered = call.q_starts[call.sequences], row_floats = call.a.heads * call.a.value_dim;
  std::memset(call.a.out + covered * row_floats, 0, (call.rows - covered) * row_floats * sizeof(float));
  std::vector<AttentionItem> items = items_of(call);
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
    Call call{parameters_, in[0].shape(0), in[5].shape(0), in[1].shape(0), in[4].data<int>(), in[5].data<int>()};
    call.a.q = in[0].data<float>();
    call.a.keys = in[1].data<char>(), call.a.values = in[2].data<char>();
    call.a.block_tables = in[3].data<int>();
    call.a.sinks = in.size() > 6 ? in[6].data<float>() : nullptr;
    call.a.out = outputs[0].data<float>();
    encoder.dispatch([call] { attend(call); });
  }

 private:
  Attention parameters_;
};

}  // namespace

mx::array paged_attention(const mx::array& q, const mx::array& k_pool, const mx::array& v_pool,
                          const mx::array& block_tables, const mx::array& q_starts, const mx::array& kv_lens,
                          float scale, int window, float softcap, const std::optional<mx::array>& sinks) {
  const char* op = "paged_attention";
  require(q.dtype() == mx::float32 && q.ndim() == 3, op, ": q must be float32 [T, H, D]");
  require(k_pool.ndim() == 4 && v_pool.ndim() == 4, op, ": pools must be [pages, H_kv, page_size, D]");
  Format format = format_of(k_pool, op, "k_pool");
  require(v_pool.dtype() == k_pool.dtype(), op, ": pools must have one dtype");
  for (int axis = 0; axis < 3; ++axis)
    require(k_pool.shape(axis) == v_pool.shape(axis), op, ": pools differ on axis ", axis);
  require(k_pool.shape(3) == q.shape(2), op, ": q has D of ", q.shape(2), ", k_pool ", k_pool.shape(3));
  require(k_pool.shape(1) > 0 && k_pool.shape(2) > 0 && v_pool.shape(3) > 0, op, ": a pool has an empty axis");
  require(q.shape(1) > 0 && q.shape(1) % k_pool.shape(1) == 0, op, ": H must be a multiple of H_kv ", k_pool.shape(1),
          ", got ", q.shape(1));
  require(kv_lens.dtype() == mx::int32 && kv_lens.ndim() == 1, op, ": kv_lens must be int32 [S]");
  require(q_starts.dtype() == mx::int32 && q_starts.ndim() == 1 && q_starts.shape(0) == kv_lens.shape(0) + 1, op,
          ": q_starts must be int32 [", kv_lens.shape(0) + 1, "]");
  require(block_tables.dtype() == mx::int32 && block_tables.ndim() == 2 && block_tables.shape(0) == kv_lens.shape(0),
          op, ": block_tables must be int32 [", kv_lens.shape(0), ", max_pages]");
  require(window >= 0, op, ": window must be positive, got ", window);
  require(softcap >= 0, op, ": softcap must be positive, got ", softcap);
  Attention a{};
  a.format = format;
  a.max_pages = block_tables.shape(1);
  a.heads = q.shape(1), a.kv_heads = k_pool.shape(1), a.page = k_pool.shape(2);
  a.dim = q.shape(2), a.value_dim = v_pool.shape(3);
  a.scale = scale, a.window = window, a.softcap = softcap;
  std::vector<mx::array> inputs{q, k_pool, v_pool, block_tables, q_starts, kv_lens};
  if (sinks) {
    require(sinks->dtype() == mx::float32 && sinks->ndim() == 1 && sinks->shape(0) == q.shape(1), op,
            ": sinks must be float32 [", q.shape(1), "]");
    inputs.push_back(*sinks);
  }
  mx::Shape shape{q.shape(0), q.shape(1), v_pool.shape(3)};
  return mx::array(std::move(shape), mx::float32, std::make_shared<PagedAttention>(cpu_stream(), a),
                   std::move(inputs));
}

}  // namespace mlxserve
