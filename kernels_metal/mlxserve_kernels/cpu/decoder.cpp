// The run of a stack of decoder layers: phases that the threads share out (team.h), on the kernels that the
// single operations have, so with their order of sums: a row has the same bits in any batch.
#include "decoder.h"

#include <cmath>
#include <cstring>

#include "decoder_run.h"
#include "isa.h"
#include "pool.h"
#include "primitive.h"
#include "stack_pools.h"

namespace mlxserve {
namespace {

constexpr long kColumns = 16;      // columns that one unit of work has at least, with few rows
constexpr long kTileColumns = 32;  // columns of a unit, with several rows and all weights in tiles
constexpr long kPartRows = 128;    // rows of a unit of work, with many

// One thread of a run.
class Worker {
 public:
  explicit Worker(Run& run)
      : run_(run), use_(kernels()), rows_(run.step.rows), private_(scratch(0, run.private_floats)) {}

  void work() {
    start();
    look_ahead(0);
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
    look_ahead(index + 1);
    prepare(run_.attended, l.o->w.k, {}, {&*l.o});
    project_and_add(l, *l.o, l.post_attention_norm);
  }

  // From here on products ask for the keys and values of this layer.
  void look_ahead(std::size_t index) {
    ahead_ = {};
    if (index == run_.stack.layers.size()) return;
    const KvPools& pools = run_.step.pools[index];
    const std::vector<long>& heads = run_.plans[run_.plan_of[index]].heads_ahead;
    ahead_ = {pools.keys.data,     pools.values.data, pools.keys.head_bytes(), pools.values.head_bytes(),
              heads.data(), long(heads.size()), &run_.ahead_next[index]};
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
    MatmulTile tile{from_, y, m.w.n, rows.begin, rows.end, cols.begin, cols.end,
                    ahead_.count ? &ahead_ : nullptr};
    if (is_tiled(m.w.format)) {
      use_.tile_matmul(m.w, integers(), run_.digits, tile);
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
    // Tiles are read in pairs by more rows than one.
    const bool is_paired = is_for_tiles_ && rows_ > 1;
    long step = is_paired ? kTileColumns : run_.is_few() ? kColumns : use_.panel_cols;
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

  KeysAhead ahead_{};

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
  DecoderStackPrimitive(mx::Stream stream, std::shared_ptr<const StackPools> pools,
                        std::shared_ptr<const Adapters> adapters)
      : CpuPrimitive(stream), pools_(std::move(pools)), adapters_(std::move(adapters)) {}

  const char* name() const override { return "MlxserveDecoderStack"; }

  // inputs: hidden, positions, slot_mapping, block_tables, q_starts, kv_lens, order, and adapter_slots where there are
  // adapters; outputs: hidden, and the new handle of order, which stands for all pools.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    std::vector<mx::array> in;
    for (int i = 0; i < kOrder; ++i) in.push_back(dense(inputs[i], encoder));
    Step step{};
    step.input = in[0].data<float>(), step.hidden = outputs[0].data<float>();
    step.positions = in[1].data<int>(), step.slots = in[2].data<int>(), step.tables = in[3].data<int>();
    step.q_starts = in[4].data<int>(), step.kv_lens = in[5].data<int>();
    step.rows = long(in[1].size()), step.sequences = in[5].shape(0), step.max_pages = in[3].shape(1);
    step.pools = pools_->pools;
    outputs[1].copy_shared_buffer(inputs[kOrder]);
    if (adapters_) step.adapters = adapters_, step.adapter_slots = dense(inputs[kOrder + 1], encoder).data<int>();
    encoder.dispatch([pools = pools_, step] { run_stack(*pools->stack, step); });
  }

 private:
  static constexpr int kOrder = 6;

  std::shared_ptr<const StackPools> pools_;
  std::shared_ptr<const Adapters> adapters_;
};

}  // namespace

std::pair<mx::array, mx::array> decoder_stack(std::shared_ptr<const StackPools> pools, const mx::array& hidden,
                                              const mx::array& positions, const mx::array& slot_mapping,
                                              const mx::array& block_tables, const mx::array& q_starts,
                                              const mx::array& kv_lens, const mx::array& order,
                                              std::shared_ptr<const Adapters> adapters,
                                              const std::optional<mx::array>& adapter_slots) {
  const char* op = "decoder_stack";
  long width = pools->stack->layers[0].hidden();
  require(hidden.dtype() == mx::float32 && hidden.ndim() >= 1 && hidden.shape(-1) == width, op,
          ": hidden must be float32 [..., ", width, "]");
  long rows = long(hidden.size()) / width;
  require(rows > 0, op, ": no rows");
  for (const mx::array* ids : {&positions, &slot_mapping, &block_tables, &q_starts, &kv_lens})
    require(ids->dtype() == mx::int32, op, ": index arrays must be int32");
  require(long(positions.size()) == rows && long(slot_mapping.size()) == rows, op,
          ": positions and slot_mapping must have ", rows, " entries");
  require(kv_lens.ndim() == 1 && q_starts.ndim() == 1 && q_starts.shape(0) == kv_lens.shape(0) + 1, op,
          ": q_starts must be [S + 1], kv_lens [S]");
  require(block_tables.ndim() == 2 && block_tables.shape(0) == kv_lens.shape(0), op,
          ": block_tables must be [S, max_pages]");
  const mx::array& first = pools->k_arrays[0];
  require(order.shape() == first.shape() && order.dtype() == first.dtype(), op, ": order is no handle of k_pools[0]");
  Arrays inputs{hidden, positions, slot_mapping, block_tables, q_starts, kv_lens, order};
  require((adapters != nullptr) == adapter_slots.has_value(), op, ": adapters and adapter_slots come together");
  if (adapters) {
    require(adapters->stack == pools->stack, op, ": the adapters were made for another stack");
    require(adapter_slots->dtype() == mx::int32 && long(adapter_slots->size()) == rows, op,
            ": adapter_slots must be int32 with ", rows, " entries");
    inputs.push_back(*adapter_slots);
  }
  Arrays outputs = mx::array::make_arrays(
      {hidden.shape(), order.shape()}, {mx::float32, order.dtype()},
      std::make_shared<DecoderStackPrimitive>(cpu_stream(), std::move(pools), std::move(adapters)), inputs);
  return {outputs[0], outputs[1]};
}

}  // namespace mlxserve
