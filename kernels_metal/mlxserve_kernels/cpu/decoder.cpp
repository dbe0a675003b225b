// The run of a stack of decoder layers: phases that the threads share out (team.h), on the kernels that the
// single operations have, so with their order of sums: a row has the same bits in any batch.
#include "decoder.h"

#include <cmath>
#include <cstring>

#include "decoder_run.h"
#include "isa.h"
#include "pool.h"
#include "primitive.h"

namespace mlxserve {
namespace {

constexpr long kColumns = 16;      // columns that one unit of work has at least, with few rows
constexpr long kTileColumns = 32;  // columns of a unit, with many rows and all weights in tiles
constexpr long kPartRows = 128;    // rows of a unit of work, with many

// One thread of a run.
class Worker {
 public:
  explicit Worker(Run& run)
      : run_(run), use_(kernels()), rows_(run.step.rows), private_(scratch(0, run.private_floats)) {}

  void work() {
    start();
    for (std::size_t i = 0; i < run_.stack.layers.size(); ++i) {
      const DecoderLayer& l = run_.stack.layers[i];
      attention_block(l, i);
      if (l.experts) experts_block(l, i);
      else if (l.has_mlp()) mlp_block(l);
    }
  }

 private:
  template <class Body>
  void share(long units, long longest, Body&& body) {
    run_.team.share(phase_++, units, longest, body);
  }
  template <class Body>
  void share(long units, Body&& body) {
    share(units, units, body);
  }

  void start() {
    const Step& step = run_.step;
    long hidden = run_.stack.layers[0].hidden();
    share(rows_, [&](long begin, long end) {
      std::memcpy(step.hidden + begin * hidden, step.input + begin * hidden, (end - begin) * hidden * sizeof(float));
      for (long row = begin; row < end; ++row) write_angles(row);
    });
  }

  void write_angles(long row) {
    float* to = run_.angles + row * run_.stack.angle_floats;
    for (const Rope& rope : run_.stack.ropes) {
      float position = float(run_.step.positions[row]) * rope.position_scale;
      const float* frequencies = rope.inverse_frequencies.data<float>();
      for (long i = 0; i < rope.half(); ++i) {
        float angle = position * frequencies[i];
        to[i] = std::cos(angle), to[rope.half() + i] = std::sin(angle);
      }
      to += 2 * rope.half();
    }
  }

  void attention_block(const DecoderLayer& l, std::size_t index) {
    prepare(run_.step.hidden, l.hidden(), l.attention_norm, {&*l.q, &*l.k, &*l.v});
    const Matrix* matrices[] = {&*l.q, &*l.k, &*l.v};
    float* outputs[] = {run_.q, run_.k, run_.v};
    columns({l.q->w.n, l.k->w.n, l.v->w.n}, [&](long which, const Range& rows, const Range& cols) {
      project(*matrices[which], outputs[which], rows, cols);
    });
    share(rows_, [&](long begin, long end) {
      for (long row = begin; row < end; ++row) finish_keys(l, index, row);
    });
    attend(l, index);
    prepare(run_.attended, l.o->w.k, {}, {&*l.o});
    project_and_add(l, *l.o, l.post_attention_norm);
  }

  void mlp_block(const DecoderLayer& l) {
    gate_and_up(l, run_.step.hidden, l.mlp_norm);
    project_and_add(l, *l.down, l.post_mlp_norm);
  }

  // The input of the layer's `down`.
  void gate_and_up(const DecoderLayer& l, const float* from, const std::optional<Norm>& norm) {
    long width = l.gate->w.n;
    prepare(from, l.hidden(), norm, {&*l.gate, &*l.up});
    columns({width}, [&](long, const Range& rows, const Range& cols) {
      project(*l.gate, run_.gate, rows, cols);
      project(*l.up, run_.up, rows, cols);
      for (long row = rows.begin; row < rows.end; ++row) {
        long at = row * width + cols.begin;
        use_.activate(l.activation, run_.gate + at, run_.up + at, cols.end - cols.begin);
      }
    });
    prepare(run_.gate, width, {}, {&*l.down});
  }

  void experts_block(const DecoderLayer& l, std::size_t index) {
    const Experts& e = *l.experts;
    const Grouping& grouping = choose_experts(l, index);
    long hidden = l.hidden(), width = e.gate.w.n;
    auto share_units = [this](long units, auto&& body) { share(units, body); };
    ExpertWorker worker(grouping, private_, share_units);
    using Order = decltype(worker)::Order;
    worker.prepare(run_.normed, hidden, Order::rows, run_.packed, is_tiled(e.gate.w.format));
    worker.multiply_gated(e.gate, e.up, l.activation, run_.expert_gates, run_.expert_ups);
    worker.prepare(run_.expert_gates, width, Order::places, run_.packed, is_tiled(e.down.w.format));
    worker.multiply(e.down, run_.expert_sums);
    if (e.shared_gate) {
      gate_and_up(l, run_.normed, {});
      columns({hidden}, [&](long, const Range& rows, const Range& cols) { project(*l.down, run_.sum, rows, cols); });
    }
    share(rows_, [&](long begin, long end) {
      for (long row = begin; row < end; ++row) {
        worker.combine_row(run_.expert_sums, hidden, run_.shares, row, private_);
        if (e.shared_gate) {
          float share = 1 / (1 + std::exp(-run_.logits[rows_ * e.count + row]));
          use_.add_scaled(private_, run_.sum + row * hidden, share, hidden);
        }
        if (const auto& norm = l.post_mlp_norm)
          use_.rms_norm(private_, norm->data, norm->format, norm->eps, 1, hidden, private_);
        use_.add_scaled(run_.step.hidden + row * hidden, private_, l.residual_multiplier, hidden);
      }
    });
  }

  // Normed rows and their experts, sorted.
  const Grouping& choose_experts(const DecoderLayer& l, std::size_t index) {
    const Experts& e = *l.experts;
    Grouping& grouping = run_.groupings[index];
    auto norm_rows = [&](long begin, long end) {
      long hidden = l.hidden();
      const float* from = run_.step.hidden + begin * hidden;
      float* to = run_.normed + begin * hidden;
      if (const auto& norm = l.mlp_norm) use_.rms_norm(from, norm->data, norm->format, norm->eps, end - begin, hidden, to);
      else std::memcpy(to, from, (end - begin) * hidden * sizeof(float));
    };
    auto route_rows = [&](long begin, long end) {
      for (long row = begin; row < end; ++row)
        route(run_.logits + row * e.count, e.count, e.top_k, e.is_normalized, run_.expert_ids.data() + row * e.top_k,
              run_.shares + row * e.top_k);
    };
    if (run_.is_few()) {
      prepare(run_.step.hidden, l.hidden(), l.mlp_norm, {&e.router});
      project_router(e);
      share(1, [&](long, long) { norm_rows(0, rows_), route_rows(0, rows_), grouping.sort(run_.expert_ids.data()); });
    } else {
      share(rows_, norm_rows);
      prepare(run_.normed, l.hidden(), {}, {&e.router, e.shared_gate ? &*e.shared_gate : &e.router});
      project_router(e);
      share(rows_, route_rows);
      share(1, [&](long, long) { grouping.sort(run_.expert_ids.data()); });
    }
    return grouping;
  }

  // The router's logits [rows, experts], behind them the shared gate's [rows].
  void project_router(const Experts& e) {
    float* shared = run_.logits + rows_ * e.count;
    columns({e.count, e.shared_gate ? 1 : 0}, [&](long which, const Range& rows, const Range& cols) {
      project(which ? *e.shared_gate : e.router, which ? shared : run_.logits, rows, cols);
    });
  }

  struct Range {
    long begin, end;
  };

  // Rows of `from` [rows, k], normed, become the input of `readers`. Few rows are normed, and turned into integers
  // for tiles, by each thread for itself; many once for all.
  void prepare(const float* from, long k, const std::optional<Norm>& norm, std::initializer_list<const Matrix*> readers) {
    from_ = from, k_ = k, norm_ = norm ? &*norm : nullptr, is_normed_ = has_integers_ = false;
    bool to_tiles = false, to_others = false;
    for (const Matrix* m : readers) (is_tiled(m->w.format) ? to_tiles : to_others) = true;
    is_for_tiles_ = !to_others;
    if (run_.is_few()) return multiply_changes(readers);
    long tile = use_.row_tile;
    share((rows_ + tile - 1) / tile, [&](long begin, long end) {
      for (long row = begin * tile; row < std::min(end * tile, rows_); row += tile) {
        long count = std::min(tile, rows_ - row);
        const float* source = from + row * k;
        if (norm_) {
          use_.rms_norm(source, norm_->data, norm_->format, norm_->eps, count, k, private_);
          source = private_;
        }
        for (const Matrix* m : readers)
          run_.changes.multiply_rows(m->site, row, count, source, private_ + run_.own_changes);
        if (to_others) use_.pack(source, count, k, run_.packed + use_.packed_floats(row, k));
        if (to_tiles)
          use_.to_digits(source, count, k, run_.digits,
                         reinterpret_cast<char*>(run_.integers) + use_.digit_bytes(row, k, run_.digits));
      }
    });
  }

  // Few rows times the first factors of their adapters. Threads share that out: what each needs of it would
  // otherwise be computed by all, or by the one thread that has the row later.
  void multiply_changes(std::initializer_list<const Matrix*> readers) {
    long total = 0;
    for (const Matrix* m : readers) total += run_.changes.units(m->site);
    if (!total) return;
    share(total, [&](long begin, long end) {
      for (const Matrix* m : readers) {
        run_.changes.multiply(m->site, begin, end, normed());
        long units = run_.changes.units(m->site);
        begin -= units, end -= units;
      }
    });
  }

  // The whole input, normed, where rows are few.
  const float* normed() {
    if (!norm_) return from_;
    if (!is_normed_) use_.rms_norm(from_, norm_->data, norm_->format, norm_->eps, rows_, k_, private_);
    is_normed_ = true;
    return private_;
  }

  const float* integers() {
    if (!run_.is_few()) return run_.integers;
    float* to = private_ + aligned(std::max(kMaxDirectRows, use_.row_tile) * run_.stack.widest);
    if (!has_integers_) use_.to_digits(normed(), rows_, k_, run_.digits, to);
    has_integers_ = true;
    return to;
  }

  void project(const Matrix& m, float* y, const Range& rows, const Range& cols) {
    MatmulTile tile{from_, y, m.w.n, rows.begin, rows.end, cols.begin, cols.end};
    if (is_tiled(m.w.format)) {
      float* panel = private_ + aligned(std::max(kMaxDirectRows, use_.row_tile) * run_.stack.widest) +
                     run_.digit_floats(run_.is_few() ? rows_ : 0);
      use_.tile_matmul(m.w, integers(), run_.digits, tile, panel);
    } else if (!run_.is_few()) {
      use_.matmul_panel(m.w, tile, run_.packed, private_);
    } else {
      tile.x = normed();
      use_.matmul_direct(m.w, tile);
    }
    if (m.bias)
      for (long row = rows.begin; row < rows.end; ++row)
        use_.add_scaled(y + row * m.w.n + cols.begin, m.bias + cols.begin, 1, cols.end - cols.begin);
    run_.changes.add(m.site, tile, private_ + run_.own_changes);
  }

  // Calls body(which, rows, cols) for rectangles that cover the columns of all matrices, for all rows. Inputs were
  // prepared for them.
  template <class Body>
  void columns(std::initializer_list<long> widths, Body&& body) {
    long step = run_.is_few() ? kColumns : is_for_tiles_ ? kTileColumns : use_.panel_cols;
    long parts = run_.is_few() ? 1 : (rows_ + kPartRows - 1) / kPartRows, panels = 0;
    for (long width : widths) panels += (width + step - 1) / step;
    share(panels * parts, [&](long begin, long end) {
      long which = 0, first = 0;
      for (long width : widths) {
        long count = (width + step - 1) / step * parts;
        long from = std::max(begin - first, 0L), to = std::min(end - first, count);
        if (run_.is_few()) {
          if (from < to) body(which, Range{0, rows_}, Range{from * step, std::min(to * step, width)});
        } else {
          for (long unit = from; unit < to; ++unit) {
            long col = unit / parts * step, row = unit % parts * kPartRows;
            body(which, Range{row, std::min(row + kPartRows, rows_)}, Range{col, std::min(col + step, width)});
          }
        }
        first += count, ++which;
      }
    });
  }

  // hidden += (x @ m^T, normed) * multiplier
  void project_and_add(const DecoderLayer& l, const Matrix& m, const std::optional<Norm>& norm) {
    long hidden = m.w.n;
    columns({hidden}, [&](long, const Range& rows, const Range& cols) {
      project(m, run_.sum, rows, cols);
      if (norm) return;
      for (long row = rows.begin; row < rows.end; ++row) {
        long at = row * hidden + cols.begin;
        use_.add_scaled(run_.step.hidden + at, run_.sum + at, l.residual_multiplier, cols.end - cols.begin);
      }
    });
    if (!norm) return;
    share(rows_, [&](long begin, long end) {
      for (long row = begin; row < end; ++row) {
        use_.rms_norm(run_.sum + row * hidden, norm->data, norm->format, norm->eps, 1, hidden, private_);
        use_.add_scaled(run_.step.hidden + row * hidden, private_, l.residual_multiplier, hidden);
      }
    });
  }

  void finish_keys(const DecoderLayer& l, std::size_t index, long row) {
    float *q = run_.q + row * l.q->w.n, *k = run_.k + row * l.k->w.n, *v = run_.v + row * l.v->w.n;
    for (auto [x, norm, width] : {std::tuple{q, &l.q_norm, l.q->w.n}, {k, &l.k_norm, l.k->w.n}})
      if (*norm) {
        const Norm& n = **norm;
        use_.rms_norm(x, n.data, n.format, n.eps, width / n.size, n.size, x);
      }
    if (l.rope) {
      const float* angles = run_.angles + row * run_.stack.angle_floats;
      for (long i = 0; i < run_.stack.angle_of[index]; ++i) angles += 2 * run_.stack.ropes[i].half();
      use_.rotate(q, l.heads, l.dim, angles, l.rope->half(), l.rope->is_interleaved, l.rope->input_scale);
      use_.rotate(k, l.kv_heads, l.dim, angles, l.rope->half(), l.rope->is_interleaved, l.rope->input_scale);
    }
    run_.step.pools[index].keys.write(run_.step.slots[row], k);
    run_.step.pools[index].values.write(run_.step.slots[row], v);
  }

  void attend(const DecoderLayer& l, std::size_t index) {
    const AttentionPlan& plan = run_.plans[run_.plan_of[index]];
    Attention a = attention_call(l, run_.step, run_.step.pools[index]).a;
    a.q = run_.q, a.out = run_.attended;
    if (plan.tasks.empty()) {
      share(long(plan.items.size()), 1, [&](long i, long) { use_.attend_whole(a, plan.items[i], private_); });
      return;
    }
    std::atomic<int>* left = &run_.splits_left[index * run_.max_items];
    // Neighbouring splits on one thread: each asks for what comes next.
    share(long(plan.tasks.size()), [&](long begin, long end) {
      for (long i = begin; i < end; ++i) {
        const SplitTask& task = plan.tasks[i];
        use_.attend_split(a, plan.items[task.item], task.split, run_.partials + task.offset, private_);
        if (left[task.item].fetch_sub(1, std::memory_order_acq_rel) == 1)
          use_.attend_merge(a, plan.items[task.item], run_.partials + plan.offsets[task.item], private_);
      }
    });
  }

  Run& run_;
  const Kernels& use_;
  const long rows_;
  float* const private_;
  long phase_ = 0;

  // The input of the next projections.
  const float* from_ = nullptr;
  long k_ = 0;
  const Norm* norm_ = nullptr;
  bool is_normed_ = false, has_integers_ = false, is_for_tiles_ = false;
};

void run_stack(const DecoderStack& stack, const Step& step) {
  for (long row = 0; step.adapters && row < step.rows; ++row)
    require(step.adapter_slots[row] >= -1 && step.adapter_slots[row] < step.adapters->table().slots,
            "decoder_stack: adapter_slots[", row, "] is ", step.adapter_slots[row], ", there are ",
            step.adapters->table().slots, " adapters");
  for (const KvPools& pools : step.pools)
    for (long row = 0, slots = pools.keys.pages * pools.keys.page; row < step.rows; ++row)
      require(step.slots[row] >= 0 && step.slots[row] < slots, "decoder_stack: slot_mapping[", row, "] is ",
              step.slots[row], ", the pool has slots 0 to ", slots - 1);
  Run run(stack, step);
  parallel_for(num_threads(), [&](long) { Worker(run).work(); });
}

class DecoderStackPrimitive : public CpuPrimitive {
 public:
  DecoderStackPrimitive(mx::Stream stream, std::shared_ptr<const DecoderStack> stack, std::vector<KvPools> pools,
                        std::shared_ptr<const Adapters> adapters)
      : CpuPrimitive(stream), stack_(std::move(stack)), pools_(std::move(pools)), adapters_(std::move(adapters)) {}

  const char* name() const override { return "MlxserveDecoderStack"; }

  // inputs: hidden, positions, slot_mapping, block_tables, q_starts, kv_lens, then k_pool, v_pool of each layer, then
  // adapter_slots where there are adapters;
  // outputs: hidden, and the first pool. Each output costs MLX time for every input and every other output, and
  // stands for nothing but an order, which one pool gives as well as all.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    std::vector<mx::array> in;
    for (int i = 0; i < kFirstPool; ++i) in.push_back(dense(inputs[i], encoder));
    Step step{};
    step.input = in[0].data<float>(), step.hidden = outputs[0].data<float>();
    step.positions = in[1].data<int>(), step.slots = in[2].data<int>(), step.tables = in[3].data<int>();
    step.q_starts = in[4].data<int>(), step.kv_lens = in[5].data<int>();
    step.rows = long(in[1].size()), step.sequences = in[5].shape(0), step.max_pages = in[3].shape(1);
    outputs[1].copy_shared_buffer(inputs[kFirstPool]);
    for (std::size_t i = 0; i < stack_->layers.size(); ++i) {
      const mx::array &keys = inputs[kFirstPool + 2 * i], &values = inputs[kFirstPool + 2 * i + 1];
      for (int part : {0, 1}) {
        const mx::array& pool = part ? values : keys;
        require(pool.flags().row_contiguous, "decoder_stack: a pool must be contiguous");
      }
      require(keys.data<char>() != values.data<char>(), "decoder_stack: k_pool and v_pool must be two buffers");
      step.pools.push_back({pools_[i].keys.at(keys), pools_[i].values.at(values)});
    }
    if (adapters_) step.adapters = adapters_, step.adapter_slots = dense(inputs.back(), encoder).data<int>();
    encoder.dispatch([stack = stack_, step = std::move(step)] { run_stack(*stack, step); });
  }

  static constexpr int kFirstPool = 6;

 private:
  std::shared_ptr<const DecoderStack> stack_;
  std::vector<KvPools> pools_;
  std::shared_ptr<const Adapters> adapters_;
};

KvPools checked_pools(const DecoderLayer& l, const mx::array& keys, const mx::array& values, int kv_bits) {
  const char* op = "decoder_stack";
  KvPools pools = kv_pools(op, keys, values, kv_bits, l.dim, l.value_dim);
  const auto& [k, v] = pools;
  require(k.pages > 0 && k.page > 0, op, ": a pool has no pages");
  require(k.heads == l.kv_heads && k.dim == l.dim && v.dim == l.value_dim, op, ": a layer has ", l.kv_heads,
          " kv heads of ", l.dim, " and ", l.value_dim, ", its pools ", k.heads, " of ", k.dim, " and ", v.dim);
  return pools;
}

}  // namespace

std::pair<mx::array, mx::array> decoder_stack(std::shared_ptr<const DecoderStack> stack, const mx::array& hidden,
                                              const mx::array& positions, const mx::array& slot_mapping,
                                              const mx::array& block_tables, const mx::array& q_starts,
                                              const mx::array& kv_lens, const Arrays& k_pools, const Arrays& v_pools,
                                              int kv_bits, std::shared_ptr<const Adapters> adapters,
                                              const std::optional<mx::array>& adapter_slots) {
  const char* op = "decoder_stack";
  std::size_t count = stack->layers.size();
  require(hidden.dtype() == mx::float32 && hidden.ndim() >= 1 && hidden.shape(-1) == stack->layers[0].hidden(), op,
          ": hidden must be float32 [..., ", stack->layers[0].hidden(), "]");
  long rows = long(hidden.size()) / hidden.shape(-1);
  require(rows > 0, op, ": no rows");
  for (const mx::array* ids : {&positions, &slot_mapping, &block_tables, &q_starts, &kv_lens})
    require(ids->dtype() == mx::int32, op, ": index arrays must be int32");
  require(long(positions.size()) == rows && long(slot_mapping.size()) == rows, op,
          ": positions and slot_mapping must have ", rows, " entries");
  require(kv_lens.ndim() == 1 && q_starts.ndim() == 1 && q_starts.shape(0) == kv_lens.shape(0) + 1, op,
          ": q_starts must be [S + 1], kv_lens [S]");
  require(block_tables.ndim() == 2 && block_tables.shape(0) == kv_lens.shape(0), op,
          ": block_tables must be [S, max_pages]");
  require(k_pools.size() == count && v_pools.size() == count, op, ": ", count, " layers need as many pools, got ",
          k_pools.size(), " and ", v_pools.size());
  std::vector<KvPools> pools;
  Arrays inputs{hidden, positions, slot_mapping, block_tables, q_starts, kv_lens};
  for (std::size_t i = 0; i < count; ++i) {
    pools.push_back(checked_pools(stack->layers[i], k_pools[i], v_pools[i], kv_bits));
    inputs.push_back(k_pools[i]);
    inputs.push_back(v_pools[i]);
  }
  require((adapters != nullptr) == adapter_slots.has_value(), op, ": adapters and adapter_slots come together");
  if (adapters) {
    require(adapters->stack == stack, op, ": the adapters were made for another stack");
    require(adapter_slots->dtype() == mx::int32 && long(adapter_slots->size()) == rows, op,
            ": adapter_slots must be int32 with ", rows, " entries");
    inputs.push_back(*adapter_slots);
  }
  auto primitive = std::make_shared<DecoderStackPrimitive>(cpu_stream(), std::move(stack), std::move(pools),
                                                           std::move(adapters));
  Arrays outputs = mx::array::make_arrays({hidden.shape(), k_pools[0].shape()}, {mx::float32, k_pools[0].dtype()},
                                          primitive, inputs);
  return {outputs[0], outputs[1]};
}

}  // namespace mlxserve
