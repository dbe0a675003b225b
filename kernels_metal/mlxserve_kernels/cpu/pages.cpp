// Writes into KV pools. The results share the memory of the pools that come in: nothing is copied, and tasks
// of the stream run in order, so a reader that was scheduled before a write never sees it.
#include <algorithm>
#include <cstring>

#include "kv_pool.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"

namespace mlxserve {
namespace {

template <class From>
void widen_row(const From* from, long n, float* to) {
  for (long i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
}

void alias(const char* op, const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  for (int i = 0; i < 2; ++i) {
    require(inputs[i].flags().row_contiguous, op, ": a pool must be contiguous");
    outputs[i].copy_shared_buffer(inputs[i]);
  }
  bool is_shared = inputs[0].size() && inputs[1].size() && inputs[0].data<char>() == inputs[1].data<char>();
  require(!is_shared, op, ": k_pool and v_pool must be two buffers");
}

// Writes `count` rows of [heads, dim] to their slots.
void write_rows(const KvPool& pool, const void* rows, mx::Dtype dtype, const int* slots, long count) {
  constexpr long kTaskRows = 16;
  const long width = pool.heads * pool.dim;
  parallel_for((count + kTaskRows - 1) / kTaskRows, [&](long task) {
    std::vector<float> wide(dtype == mx::float32 ? 0 : width);
    for (long t = task * kTaskRows; t < std::min((task + 1) * kTaskRows, count); ++t) {
      const float* from = static_cast<const float*>(rows) + t * width;
      if (dtype != mx::float32) {
        if (dtype == mx::float16) widen_row(static_cast<const mx::float16_t*>(rows) + t * width, width, wide.data());
        else widen_row(static_cast<const mx::bfloat16_t*>(rows) + t * width, width, wide.data());
        from = wide.data();
      }
      pool.write(slots[t], from);
    }
  });
}

class WritePages : public CpuPrimitive {
 public:
  WritePages(mx::Stream stream, const KvPools& pools) : CpuPrimitive(stream), pools_(pools) {}

  const char* name() const override { return "MlxserveWritePages"; }

  // inputs: k_pool, v_pool, k, v, slot_mapping.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    alias("write_pages", inputs, outputs);
    mx::array k = dense(inputs[2], encoder), v = dense(inputs[3], encoder), slots = dense(inputs[4], encoder);
    encoder.dispatch([keys = pools_.keys.at(outputs[0]), values = pools_.values.at(outputs[1]),
                      k_from = k.data<char>(), v_from = v.data<char>(), k_dtype = k.dtype(), v_dtype = v.dtype(), at = slots.data<int>(),
                      count = long(slots.size())] {
      for (long t = 0; t < count; ++t)
        require(at[t] >= 0 && at[t] < keys.pages * keys.page, "write_pages: slot_mapping[", t, "] is ", at[t],
                ", the pool has slots 0 to ", keys.pages * keys.page - 1);
      write_rows(keys, k_from, k_dtype, at, count);
      write_rows(values, v_from, v_dtype, at, count);
    });
  }

 private:
  KvPools pools_;
};

class CopyPages : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  const char* name() const override { return "MlxserveCopyPages"; }

  // inputs: k_pool, v_pool, source_ids, target_ids.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    alias("copy_pages", inputs, outputs);
    mx::array sources = dense(inputs[2], encoder), targets = dense(inputs[3], encoder);
    long pages = outputs[0].shape(0);
    auto page_bytes = [&](int i) { return pages ? long(outputs[i].nbytes()) / pages : 0; };
    encoder.dispatch([pages, keys = outputs[0].data<char>(), values = outputs[1].data<char>(), key_bytes = page_bytes(0),
                      value_bytes = page_bytes(1), from = sources.data<int>(), to = targets.data<int>(),
                      count = long(sources.size())] {
      for (long i = 0; i < count; ++i) {
        require(from[i] >= 0 && from[i] < pages, "copy_pages: source_ids[", i, "] is ", from[i], ", the pool has ",
                pages, " pages");
        require(to[i] >= 0 && to[i] < pages, "copy_pages: target_ids[", i, "] is ", to[i], ", the pool has ", pages,
                " pages");
      }
      for (auto [pool, bytes] : {std::pair{keys, key_bytes}, {values, value_bytes}})
        for (long i = 0; i < count; ++i) std::memmove(pool + to[i] * bytes, pool + from[i] * bytes, bytes);
    });
  }
};

void require_ids(const char* op, const char* name, const mx::array& ids, long count) {
  require(ids.dtype() == mx::int32 && ids.ndim() == 1 && ids.shape(0) == count, op, ": ", name, " must be int32 [",
          count, "]");
}

std::pair<mx::array, mx::array> lazy_write(std::shared_ptr<mx::Primitive> primitive, std::vector<mx::array> inputs) {
  auto outputs = mx::array::make_arrays({inputs[0].shape(), inputs[1].shape()}, {inputs[0].dtype(), inputs[1].dtype()},
                                        primitive, inputs);
  return {outputs[0], outputs[1]};
}

}  // namespace

std::pair<mx::array, mx::array> write_pages(const mx::array& k_pool, const mx::array& v_pool, const mx::array& k,
                                            const mx::array& v, const mx::array& slot_mapping, int kv_bits) {
  const char* op = "write_pages";
  format_of(k, op, "k");
  format_of(v, op, "v");
  require(k.ndim() == 3 && v.ndim() == 3 && k.shape(0) == v.shape(0), op, ": k and v must be [T, heads, D]");
  KvPools pools = kv_pools(op, k_pool, v_pool, kv_bits, k.shape(2), v.shape(2));
  const auto& [keys, values] = pools;
  require(k.shape(1) == keys.heads && v.shape(1) == keys.heads, op, ": k and v must have ", keys.heads, " heads");
  require(k.shape(2) == keys.dim && v.shape(2) == values.dim, op, ": k and v must have D of ", keys.dim, " and ",
          values.dim);
  require_ids(op, "slot_mapping", slot_mapping, k.shape(0));
  return lazy_write(std::make_shared<WritePages>(cpu_stream(), pools), {k_pool, v_pool, k, v, slot_mapping});
}

std::pair<mx::array, mx::array> copy_pages(const mx::array& k_pool, const mx::array& v_pool,
                                           const mx::array& source_ids, const mx::array& target_ids) {
  const char* op = "copy_pages";
  require(k_pool.ndim() >= 1 && v_pool.ndim() >= 1 && k_pool.shape(0) == v_pool.shape(0), op,
          ": pools differ in pages, or have none");
  require(source_ids.ndim() == 1, op, ": source_ids must be int32 [C]");
  require_ids(op, "source_ids", source_ids, source_ids.shape(0));
  require_ids(op, "target_ids", target_ids, source_ids.shape(0));
  return lazy_write(std::make_shared<CopyPages>(cpu_stream()), {k_pool, v_pool, source_ids, target_ids});
}

}  // namespace mlxserve
