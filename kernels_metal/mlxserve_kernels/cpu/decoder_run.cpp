#include "decoder_run.h"

#include <algorithm>
#include <cstring>

#include "isa.h"
#include "pool.h"
#include "primitive.h"

namespace mlxserve {
namespace {

constexpr long kPhasesOfALayer = 27;  // of decoder.cpp's, at most: with adapters, experts and a shared one

bool has_same_plan(const Attention& a, const Attention& b) {
  return a.window == b.window && a.heads == b.heads && a.kv_heads == b.kv_heads && a.dim == b.dim &&
         a.value_dim == b.value_dim && a.page == b.page && a.format == b.format;
}

// The heads of all pages in sight, as far as caches may hold them until attention begins. None where nobody asks: one
// row alone reads weights as fast as memory gives, many have more work than their keys and values take time.
std::vector<long> heads_ahead(const AttentionCall& call, long bytes_of_a_head) {
  constexpr long kCacheBytes = 8L << 20, kMaxRows = 64;
  const Attention& a = call.a;
  std::vector<long> heads;
  if (call.rows == 1 || call.rows > kMaxRows) return heads;
  for (long s = 0; s < call.sequences; ++s) {
    if (call.q_starts[s] == call.q_starts[s + 1]) continue;
    for (long i = call.first_page(s); i * a.page < call.kv_lens[s]; ++i)
      for (long head = 0; head < a.kv_heads; ++head) {
        if (long(heads.size() + 1) * bytes_of_a_head > kCacheBytes) return heads;
        heads.push_back(a.block_tables[s * a.max_pages + i] * a.kv_heads + head);
      }
  }
  return heads;
}

AttentionPlan plan_attention(const AttentionCall& call, const KvPools& pools) {
  const Kernels& use = kernels();
  AttentionPlan plan{call, attention_items(call), {}, {}, 0, 0, {}};
  plan.heads_ahead = heads_ahead(call, pools.keys.head_bytes() + pools.values.head_bytes());
  long max_rows = 0;
  bool has_splits = false;
  for (const AttentionItem& item : plan.items) {
    max_rows = std::max(max_rows, item.num_rows);
    has_splits |= call.num_splits(item) > 1;
  }
  plan.scratch_floats = use.attention_scratch_floats(call.a, max_rows);
  if (!has_splits || long(plan.items.size()) >= 8L * num_threads()) return plan;
  for (long i = 0; i < long(plan.items.size()); ++i) {
    plan.offsets.push_back(plan.partial_floats);
    for (long split = 0; split < call.num_splits(plan.items[i]); ++split) {
      plan.tasks.push_back({i, call.first_split(plan.items[i]) + split, plan.partial_floats});
      plan.partial_floats += use.partial_floats(call.a, plan.items[i].num_rows);
    }
  }
  return plan;
}

}  // namespace

AttentionCall attention_call(const DecoderLayer& l, const Step& step, const KvPools& pools) {
  AttentionCall call{};
  Attention& a = call.a;
  a.keys = pools.keys.data, a.values = pools.values.data, a.format = pools.keys.format;
  a.block_tables = step.tables, a.max_pages = step.max_pages;
  a.heads = l.heads, a.kv_heads = l.kv_heads, a.page = pools.keys.page, a.dim = l.dim, a.value_dim = l.value_dim;
  a.scale = l.scale, a.window = l.window, a.softcap = l.softcap;
  a.sinks = l.sinks ? l.sinks->data<float>() : nullptr;
  call.rows = step.rows, call.sequences = step.sequences, call.pages = pools.keys.pages;
  call.q_starts = step.q_starts, call.kv_lens = step.kv_lens;
  return call;
}

Run::Run(const DecoderStack& stack, const Step& step)
    : stack(stack), step(step), team(long(stack.layers.size()) * kPhasesOfALayer + 1) {
  if (step.adapters) changes = RowChanges(step.adapters->table(), step.adapter_slots, step.rows);
  plan();
  place();
}

std::size_t Run::digit_floats(long rows) const {
  return aligned(kernels().digit_bytes(rows, stack.widest, digits) / sizeof(float));
}

void Run::plan() {
  for (std::size_t i = 0; i < stack.layers.size(); ++i) {
    AttentionCall call = attention_call(stack.layers[i], step, step.pools[i]);
    check_attention(call);
    auto found = std::find_if(plans.begin(), plans.end(),
                              [&](const AttentionPlan& p) { return has_same_plan(p.call.a, call.a); });
    plan_of.push_back(found - plans.begin());
    if (found == plans.end()) plans.push_back(plan_attention(call, step.pools[i]));
  }
  ahead_next.resize(stack.layers.size());
  for (const AttentionPlan& each : plans)
    if (!each.tasks.empty()) max_items = std::max(max_items, long(each.items.size()));
  splits_left = std::vector<std::atomic<int>>(max_items * stack.layers.size());
  for (std::size_t i = 0; i < stack.layers.size(); ++i) {
    const AttentionPlan& each = plans[plan_of[i]];
    if (each.tasks.empty()) continue;
    for (std::size_t item = 0; item < each.items.size(); ++item)
      splits_left[i * max_items + item] = int(each.call.num_splits(each.items[item]));
  }
}

void Run::place() {
  const Kernels& use = kernels();
  long rows = step.rows;
  std::size_t sizes[10] = {std::size_t(rows * stack.angle_floats)};
  for (const DecoderLayer& l : stack.layers) {
    sizes[1] = std::max<std::size_t>(sizes[1], rows * l.q->w.n);
    sizes[2] = std::max<std::size_t>(sizes[2], rows * l.k->w.n);
    sizes[3] = std::max<std::size_t>(sizes[3], rows * l.v->w.n);
    sizes[4] = std::max<std::size_t>(sizes[4], rows * l.o->w.k);
    sizes[5] = std::max<std::size_t>(sizes[5], rows * l.hidden());
    if (l.has_mlp()) sizes[6] = std::max<std::size_t>(sizes[6], rows * l.gate->w.n);
  }
  if (!is_few()) {
    sizes[7] = stack.has_plain ? use.packed_floats(rows, stack.widest) : 0;
    sizes[8] = stack.has_tiles ? digit_floats(rows) : 0;
  }
  for (const AttentionPlan& each : plans) {
    sizes[9] = std::max(sizes[9], each.partial_floats);
    private_floats = std::max(private_floats, each.scratch_floats);
  }
  std::size_t normed_floats = aligned(std::max(kMaxDirectRows, use.row_tile) * stack.widest);
  private_floats = std::max(private_floats, normed_floats);
  if (stack.has_tiles && is_few()) private_floats = std::max(private_floats, normed_floats + digit_floats(rows));
  if (!is_few() && stack.has_plain) private_floats = std::max(private_floats, use.panel_floats(stack.widest));
  std::size_t expert_sizes[6] = {};
  place_experts(expert_sizes, sizes[7]);
  std::size_t total = aligned(sizes[6]);
  for (std::size_t size : sizes) total += aligned(size);
  for (std::size_t size : expert_sizes) total += aligned(size);
  total += changes.shared_floats();
  float* next = scratch(2, total);
  for (auto [to, size] : {std::pair{&angles, sizes[0]}, {&q, sizes[1]}, {&k, sizes[2]}, {&v, sizes[3]},
                          {&attended, sizes[4]}, {&sum, sizes[5]}, {&gate, sizes[6]}, {&up, sizes[6]},
                          {&packed, sizes[7]}, {&integers, sizes[8]}, {&partials, sizes[9]},
                          {&normed, expert_sizes[0]}, {&logits, expert_sizes[1]}, {&shares, expert_sizes[2]},
                          {&expert_gates, expert_sizes[3]}, {&expert_ups, expert_sizes[4]},
                          {&expert_sums, expert_sizes[5]}})
    *to = next, next += aligned(size);
  changes.place(next);
  own_changes = aligned(private_floats);
  private_floats = own_changes + changes.own_floats();
  // Rows of no sequence attend to nothing.
  long covered = step.q_starts[step.sequences];
  if (covered < rows) std::memset(attended, 0, sizes[4] * sizeof(float));
}

void Run::place_experts(std::size_t* sizes, std::size_t& packing) {
  for (const DecoderLayer& l : stack.layers) {
    if (!l.experts) {
      groupings.emplace_back(0, 1, 0);
      continue;
    }
    const Experts& e = *l.experts;
    groupings.emplace_back(step.rows, e.top_k, e.count);
    long pairs = step.rows * e.top_k, width = e.gate.w.n;
    std::size_t needed[] = {std::size_t(step.rows * l.hidden()), std::size_t(step.rows * (e.count + 1)),
                            std::size_t(pairs), std::size_t(pairs * width), std::size_t(pairs * width),
                            std::size_t(pairs * l.hidden())};
    for (int i = 0; i < 6; ++i) sizes[i] = std::max(sizes[i], needed[i]);
    private_floats = std::max(private_floats, expert_scratch_floats(std::max(l.hidden(), width)));
    // The experts of a row differ, so few rows are few of each.
    long rows = is_few() ? 0 : groupings.back().max_packed_rows();
    for (const Weight& w : {e.gate.w, e.down.w})
      packing = std::max(packing, expert_input_floats(groupings.back(), rows, w.k, is_tiled(w.format)));
    if (expert_ids.size() < std::size_t(pairs)) expert_ids.resize(pairs);
  }
}

}  // namespace mlxserve
