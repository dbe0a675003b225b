// Causal attention over whole rows of a batch, with its gradient. No array of scores is ever made.
#include <algorithm>
#include <cstring>

#include "heads_view.h"
#include "isa.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"
#include "room.h"
#include "training_kernels.h"

namespace mlxserve {
namespace {

constexpr long kBlock = kAttentionBlock;

struct Settings {
  float scale, softcap;
  long window;  // 0: none
};

long blocks_of(long length) { return (length + kBlock - 1) / kBlock; }

// The first key that each query of a row sees. Segments are runs of equal ids.
void set_first_keys(const int* segments, long length, long window, int* first_keys) {
  long start = 0;
  for (long i = 0; i < length; ++i) {
    if (segments && i > 0 && segments[i] != segments[i - 1]) start = i;
    first_keys[i] = int(window ? std::max(start, i - window + 1) : start);
  }
}

// Keys or values in blocks, zeros at their ends: as [position][dimension], or turned, or both.
void pack_blocks(const HeadsView& x, long padded, float* blocks, float* turned) {
  const long count = blocks_of(x.length);
  parallel_for(x.batch * x.heads * count, [&](long task) {
    const long head = task / count, first = task % count * kBlock, rows = std::min(kBlock, x.length - first);
    const float* from = x.head(head / x.heads, head % x.heads) + first * x.row_stride;
    if (blocks) {
      float* to = blocks + task * kBlock * padded;
      std::memset(to, 0, kBlock * padded * sizeof(float));
      for (long row = 0; row < rows; ++row) std::memcpy(to + row * padded, from + row * x.row_stride, x.dim * sizeof(float));
    }
    if (turned) {
      float* to = turned + task * kBlock * x.dim;
      if (rows < kBlock) std::memset(to, 0, kBlock * x.dim * sizeof(float));
      // A few dimensions at a time, so that both sides stay in the first cache.
      for (long begin = 0; begin < x.dim; begin += 16)
        for (long row = 0; row < rows; ++row)
          for (long i = begin; i < std::min(begin + 16, x.dim); ++i) to[i * kBlock + row] = from[row * x.row_stride + i];
    }
  });
}

// What both directions compute from: queries, keys and values, packed.
struct Call {
  HeadsView q, k, v;
  const int* segments;  // [batch, length], or null
  Settings settings;
  long padded_dim, padded_value_dim;

  long groups() const { return q.heads / k.heads; }
  long positions() const { return blocks_of(k.length) * kBlock; }
  std::size_t key_floats() const { return k.batch * k.heads * positions() * padded_dim; }
  std::size_t value_floats() const { return v.batch * v.heads * positions() * padded_value_dim; }
  std::size_t turned_key_floats() const { return k.batch * k.heads * positions() * k.dim; }
  std::size_t turned_value_floats() const { return v.batch * v.heads * positions() * v.dim; }
};

struct Packed {
  float *keys, *turned_keys, *values, *turned_values;  // null where not needed
  std::vector<int> first_keys;                         // [batch or 1, length]
};

void set_first_keys(const Call& call, Packed& packed) {
  const long rows = call.segments ? call.q.batch : 1, length = call.q.length;
  packed.first_keys.resize(rows * length);
  for (long row = 0; row < rows; ++row)
    set_first_keys(call.segments ? call.segments + row * length : nullptr, length, call.settings.window,
                   packed.first_keys.data() + row * length);
}

CausalHead head_of(const Call& call, const Packed& packed, long row, long head) {
  const long kv = row * call.k.heads + head / call.groups(), positions = call.positions();
  auto at = [&](const float* p, long width) { return p ? p + kv * positions * width : nullptr; };
  return {call.q.length,
          call.q.dim,
          call.v.dim,
          call.padded_dim,
          call.padded_value_dim,
          call.settings.scale,
          call.settings.softcap,
          packed.first_keys.data() + (call.segments ? row * call.q.length : 0),
          call.q.head(row, head),
          call.q.row_stride,
          at(packed.keys, call.padded_dim),
          at(packed.turned_keys, call.k.dim),
          at(packed.values, call.padded_value_dim),
          at(packed.turned_values, call.v.dim)};
}

Call call_of(const std::vector<mx::array>& inputs, bool has_segments, const Settings& settings,
             mx::cpu::CommandEncoder& encoder) {
  Call call{heads_view(inputs[0], encoder), heads_view(inputs[1], encoder), heads_view(inputs[2], encoder), nullptr,
            settings, round_up(long(inputs[1].shape(3)), kBlockLanes), round_up(long(inputs[2].shape(3)), kBlockLanes)};
  if (has_segments) call.segments = dense(inputs[3], encoder).data<int>();
  return call;
}

void attend(const Call& call, const HeadsView& out, float* log_sums) {
  Room room(call.turned_key_floats() + call.value_floats());
  Packed packed{nullptr, room.take(call.turned_key_floats()), room.take(call.value_floats()), nullptr, {}};
  pack_blocks(call.k, 0, nullptr, packed.turned_keys);
  pack_blocks(call.v, call.padded_value_dim, packed.values, nullptr);
  set_first_keys(call, packed);
  const long blocks = blocks_of(call.q.length), heads = call.q.batch * call.q.heads;
  // The longest contexts first, so that threads end together.
  parallel_for(heads * blocks, [&](long task) {
    const long block = blocks - 1 - task / heads, row = task % heads / call.q.heads, head = task % call.q.heads;
    const CausalHead h = head_of(call, packed, row, head);
    const long begin = block * kBlock, end = std::min(begin + kBlock, h.length);
    const TrainingKernels& use = *kernels().training;
    use.attend_causal(h, begin, end, out.head(row, head) + begin * out.row_stride, out.row_stride,
                      log_sums + task % heads * h.length + begin, scratch(0, use.causal_scratch_floats(h)));
  });
}

// Adds up the gradients of the query heads that share a head; `from` [batch, query heads, positions, padded].
void sum_groups(const Call& call, const float* from, long padded, const HeadsView& to) {
  const long groups = call.groups(), positions = call.positions();
  parallel_for(to.batch * to.heads, [&](long head) {
    for (long row = 0; row < to.length; ++row) {
      float* y = to.head(head / to.heads, head % to.heads) + row * to.row_stride;
      for (long group = 0; group < groups; ++group) {
        const float* x = from + ((head * groups + group) * positions + row) * padded;
        if (group == 0) std::memcpy(y, x, to.dim * sizeof(float));
        else kernels().add_scaled(y, x, 1, to.dim);
      }
    }
  });
}

struct Back {
  HeadsView out, d_out, d_q, d_k, d_v;
  const float* log_sums;
};

void attend_back(const Call& call, const Back& back) {
  const std::size_t d_keys = call.key_floats() * call.groups(), d_values = call.value_floats() * call.groups();
  Room room(call.key_floats() + call.turned_key_floats() + call.turned_value_floats() + d_keys + d_values);
  float *keys = room.take(call.key_floats()), *of_keys = room.take(d_keys), *of_values = room.take(d_values);
  Packed packed{keys, room.take(call.turned_key_floats()), nullptr, room.take(call.turned_value_floats()), {}};
  pack_blocks(call.k, call.padded_dim, packed.keys, packed.turned_keys);
  pack_blocks(call.v, 0, nullptr, packed.turned_values);
  set_first_keys(call, packed);
  const long heads = call.q.batch * call.q.heads, positions = call.positions();
  parallel_for(heads, [&](long task) {
    const long row = task / call.q.heads, head = task % call.q.heads;
    const CausalHead h = head_of(call, packed, row, head);
    const CausalHeadGradient g{back.out.head(row, head),
                               back.d_out.head(row, head),
                               back.out.row_stride,
                               back.d_out.row_stride,
                               back.log_sums + task * h.length,
                               back.d_q.head(row, head),
                               back.d_q.row_stride,
                               of_keys + task * positions * h.padded_dim,
                               of_values + task * positions * h.padded_value_dim};
    const TrainingKernels& use = *kernels().training;
    use.causal_gradient(h, g, scratch(0, use.causal_gradient_scratch_floats(h)));
  });
  sum_groups(call, of_keys, call.padded_dim, back.d_k);
  sum_groups(call, of_values, call.padded_value_dim, back.d_v);
}

class CausalAttentionGradient : public CpuPrimitive {
 public:
  CausalAttentionGradient(mx::Stream stream, Settings settings, bool has_segments)
      : CpuPrimitive(stream), settings_(settings), has_segments_(has_segments) {}

  const char* name() const override { return "MlxserveCausalAttentionGradient"; }

  // inputs: q, k, v, perhaps segments, then the output, the logarithms of its sums, and what comes back to it.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (mx::array& out : outputs) allocate_heads(out);
    if (inputs[0].size() == 0) return;
    Call call = call_of(inputs, has_segments_, settings_, encoder);
    const int at = has_segments_ ? 4 : 3;
    Back back{heads_view(inputs[at], encoder), heads_view(inputs[at + 2], encoder), heads_view(outputs[0]),
              heads_view(outputs[1]), heads_view(outputs[2]), dense(inputs[at + 1], encoder).data<float>()};
    encoder.dispatch([call, back] { attend_back(call, back); });
  }

 private:
  Settings settings_;
  bool has_segments_;
};

class CausalAttention : public CpuPrimitive {
 public:
  CausalAttention(mx::Stream stream, Settings settings, bool has_segments)
      : CpuPrimitive(stream), settings_(settings), has_segments_(has_segments) {}

  const char* name() const override { return "MlxserveCausalAttention"; }

  // inputs: q, k, v, perhaps segments; outputs: [B, H, L, Dv], and the logarithms of the sums [B, H, L].
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate_heads(outputs[0]);
    allocate(outputs[1]);
    if (inputs[0].size() == 0) return;
    Call call = call_of(inputs, has_segments_, settings_, encoder);
    encoder.dispatch([call, out = heads_view(outputs[0]), log_sums = outputs[1].data<float>()] {
      attend(call, out, log_sums);
    });
  }

  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>& outputs) override {
    std::vector<mx::array> inputs = primals;
    inputs.insert(inputs.end(), {outputs[0], outputs[1], cotangents[0]});
    auto all = mx::array::make_arrays({primals[0].shape(), primals[1].shape(), primals[2].shape()},
                                      {mx::float32, mx::float32, mx::float32},
                                      std::make_shared<CausalAttentionGradient>(stream(), settings_, has_segments_),
                                      inputs);
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      require(argnum < 3, "causal_attention: there is no gradient of segments");
      gradients.push_back(all[argnum]);
    }
    return gradients;
  }

 private:
  Settings settings_;
  bool has_segments_;
};

}  // namespace

mx::array causal_attention(const mx::array& q, const mx::array& k, const mx::array& v,
                           const std::optional<mx::array>& segments, float scale, int window, float softcap) {
  const char* op = "causal_attention";
  for (auto [name, a] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}}) require_heads(op, name, *a);
  require(k.shape(0) == q.shape(0) && k.shape(2) == q.shape(2) && k.shape(3) == q.shape(3), op,
          ": k must have the rows, length and dimensions of q");
  require(k.shape(1) > 0 && q.shape(1) % k.shape(1) == 0, op, ": q has ", q.shape(1), " heads, k has ", k.shape(1));
  require(v.shape(0) == k.shape(0) && v.shape(1) == k.shape(1) && v.shape(2) == k.shape(2) && v.shape(3) > 0, op,
          ": v must have the rows, heads and length of k");
  std::vector<mx::array> inputs{q, k, v};
  if (segments) {
    require(segments->dtype() == mx::int32 && segments->shape() == mx::Shape{q.shape(0), q.shape(2)}, op,
            ": segments must be int32 [", q.shape(0), ", ", q.shape(2), "]");
    inputs.push_back(*segments);
  }
  require(window >= 0 && softcap >= 0, op, ": window and softcap must not be negative");
  mx::Shape shape = q.shape(), sums = q.shape();
  shape[3] = v.shape(3);
  sums.pop_back();
  auto primitive =
      std::make_shared<CausalAttention>(cpu_stream(), Settings{scale, softcap, window}, segments.has_value());
  return mx::array::make_arrays({shape, sums}, {mx::float32, mx::float32}, std::move(primitive), inputs)[0];
}

}  // namespace mlxserve
