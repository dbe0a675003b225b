// Writes into KV pools. The results share the memory of the pools that come in: nothing is copied, and tasks
// of the stream run in order, so a reader that was scheduled before a write never sees it.
#include <algorithm>
#include <cstring>

#include "ops.h"
#include "pool.h"
#include "primitive.h"

namespace mlxserve {
namespace {

struct Pool {
  char* data;
  long pages, heads, page, dim, item;

  explicit Pool(mx::array& a)
      : data(a.data<char>()), pages(a.shape(0)), heads(a.shape(1)), page(a.shape(2)), dim(a.shape(3)),
        item(long(a.itemsize())) {}
  long page_bytes() const { return heads * page * dim * item; }
};

void alias(const char* op, const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  for (int i = 0; i < 2; ++i) {
    require(inputs[i].flags().row_contiguous, op, ": a pool must be contiguous");
    outputs[i].copy_shared_buffer(inputs[i]);
  }
  bool is_shared = inputs[0].size() && inputs[1].size() && inputs[0].data<char>() == inputs[1].data<char>();
  require(!is_shared, op, ": k_pool and v_pool must be two buffers");
}

template <class To, class From>
void write_rows(const Pool& pool, const From* rows, const int* slots, long count) {
  constexpr long kTaskRows = 16;
  parallel_for((count + kTaskRows - 1) / kTaskRows, [&](long task) {
    for (long t = task * kTaskRows; t < std::min((task + 1) * kTaskRows, count); ++t) {
      long page = slots[t] / pool.page, slot = slots[t] % pool.page;
      for (long h = 0; h < pool.heads; ++h) {
        To* to = reinterpret_cast<To*>(pool.data) + ((page * pool.heads + h) * pool.page + slot) * pool.dim;
        const From* from = rows + (t * pool.heads + h) * pool.dim;
        if constexpr (std::is_same_v<To, From>) std::memcpy(to, from, pool.dim * sizeof(To));
        else
          for (long d = 0; d < pool.dim; ++d) to[d] = static_cast<To>(static_cast<float>(from[d]));
      }
    }
  });
}

using WriteRows = void (*)(const Pool&, const void*, const int*, long);

template <class To, class From>
void write_untyped(const Pool& pool, const void* rows, const int* slots, long count) {
  write_rows<To>(pool, static_cast<const From*>(rows), slots, count);
}

template <class To>
WriteRows writer_from(mx::Dtype from) {
  if (from == mx::float32) return write_untyped<To, float>;
  if (from == mx::float16) return write_untyped<To, mx::float16_t>;
  return write_untyped<To, mx::bfloat16_t>;
}

WriteRows writer(mx::Dtype to, mx::Dtype from) {
  if (to == mx::float32) return writer_from<float>(from);
  if (to == mx::float16) return writer_from<mx::float16_t>(from);
  return writer_from<mx::bfloat16_t>(from);
}

class WritePages : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  const char* name() const override { return "MlxserveWritePages"; }

  // inputs: k_pool, v_pool, k, v, slot_mapping.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    alias("write_pages", inputs, outputs);
    mx::array k = dense(inputs[2], encoder), v = dense(inputs[3], encoder), slots = dense(inputs[4], encoder);
    encoder.dispatch([keys = Pool(outputs[0]), values = Pool(outputs[1]), k_from = k.data<char>(),
                      v_from = v.data<char>(), at = slots.data<int>(), count = long(slots.size()),
                      write_k = writer(outputs[0].dtype(), k.dtype()),
                      write_v = writer(outputs[1].dtype(), v.dtype())] {
      for (long t = 0; t < count; ++t)
        require(at[t] >= 0 && at[t] < keys.pages * keys.page, "write_pages: slot_mapping[", t, "] is ", at[t],
                ", the pool has slots 0 to ", keys.pages * keys.page - 1);
      write_k(keys, k_from, at, count);
      write_v(values, v_from, at, count);
    });
  }
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
    encoder.dispatch([keys = Pool(outputs[0]), values = Pool(outputs[1]), from = sources.data<int>(),
                      to = targets.data<int>(), count = long(sources.size())] {
      for (long i = 0; i < count; ++i) {
        require(from[i] >= 0 && from[i] < keys.pages, "copy_pages: source_ids[", i, "] is ", from[i],
                ", the pool has ", keys.pages, " pages");
        require(to[i] >= 0 && to[i] < keys.pages, "copy_pages: target_ids[", i, "] is ", to[i], ", the pool has ",
                keys.pages, " pages");
      }
      for (const Pool& pool : {keys, values})
        for (long i = 0; i < count; ++i)
          std::memmove(pool.data + to[i] * pool.page_bytes(), pool.data + from[i] * pool.page_bytes(),
                       pool.page_bytes());
    });
  }
};

void require_pools(const char* op, const mx::array& k_pool, const mx::array& v_pool) {
  format_of(k_pool, op, "k_pool");
  format_of(v_pool, op, "v_pool");
  require(k_pool.ndim() == 4 && v_pool.ndim() == 4, op, ": pools must be [pages, heads, page_size, D]");
  for (int axis = 0; axis < 3; ++axis)
    require(k_pool.shape(axis) == v_pool.shape(axis), op, ": pools differ on axis ", axis, ": ", k_pool.shape(axis),
            " and ", v_pool.shape(axis));
}

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
                                            const mx::array& v, const mx::array& slot_mapping) {
  const char* op = "write_pages";
  require_pools(op, k_pool, v_pool);
  format_of(k, op, "k");
  format_of(v, op, "v");
  require(k.ndim() == 3 && v.ndim() == 3 && k.shape(0) == v.shape(0), op, ": k and v must be [T, heads, D]");
  require(k.shape(1) == k_pool.shape(1) && v.shape(1) == v_pool.shape(1), op, ": k and v must have ", k_pool.shape(1),
          " heads");
  require(k.shape(2) == k_pool.shape(3) && v.shape(2) == v_pool.shape(3), op, ": k and v must have D of ",
          k_pool.shape(3), " and ", v_pool.shape(3));
  require_ids(op, "slot_mapping", slot_mapping, k.shape(0));
  return lazy_write(std::make_shared<WritePages>(cpu_stream()), {k_pool, v_pool, k, v, slot_mapping});
}

std::pair<mx::array, mx::array> copy_pages(const mx::array& k_pool, const mx::array& v_pool,
                                           const mx::array& source_ids, const mx::array& target_ids) {
  const char* op = "copy_pages";
  require_pools(op, k_pool, v_pool);
  require(source_ids.ndim() == 1, op, ": source_ids must be int32 [C]");
  require_ids(op, "source_ids", source_ids, source_ids.shape(0));
  require_ids(op, "target_ids", target_ids, source_ids.shape(0));
  return lazy_write(std::make_shared<CopyPages>(cpu_stream()), {k_pool, v_pool, source_ids, target_ids});
}

}  // namespace mlxserve
