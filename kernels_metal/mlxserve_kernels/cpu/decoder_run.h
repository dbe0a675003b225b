// What all threads of a run of a stack share: how its work is cut up, and the memory in which phases hand on results.
#pragma once

#include <atomic>
#include <span>
#include <vector>

#include "adapters.h"
#include "attention_plan.h"
#include "decoder.h"
#include "kv_pool.h"
#include "team.h"
#include "tiles_view.h"

namespace mlxserve {

// What is given to a run. Pointers are to contiguous int32 and float32 arrays.
struct Step {
  long rows, sequences, max_pages;
  const int *positions, *slots, *tables, *q_starts, *kv_lens;
  const float* input;
  float* hidden;
  std::span<const KvPools> pools;
  std::shared_ptr<const Adapters> adapters;  // perhaps none
  const int* adapter_slots;
};

struct SplitTask {
  long item, split;
  std::size_t offset;
};

// How the attention of some layers is cut up.
struct AttentionPlan {
  AttentionCall call;
  std::vector<AttentionItem> items;
  std::vector<SplitTask> tasks;      // empty: items are done whole
  std::vector<std::size_t> offsets;  // of the first partial result of each item
  std::size_t partial_floats = 0, scratch_floats = 0;
  std::vector<long> heads_ahead;  // what to ask for before attention begins, see KeysAhead
};

AttentionCall attention_call(const DecoderLayer& l, const Step& step, const KvPools& pools);

class Run {
 public:
  // Throws std::invalid_argument where the step's arrays do not fit each other or the pools.
  Run(const DecoderStack& stack, const Step& step);

  bool is_few() const { return step.rows <= kMaxDirectRows; }
  // Room for so many rows of the widest input as integers.
  std::size_t digit_floats(long rows) const;

  const DecoderStack& stack;
  const Step& step;
  Team team;
  std::vector<AttentionPlan> plans;
  std::vector<long> plan_of;
  std::vector<std::atomic<int>> splits_left;  // [layer][item]
  long max_items = 0;
  std::vector<long> ahead_next;  // [layer], see KeysAhead
  std::size_t private_floats = 0;
  const long digits = num_digits();
  float *angles, *q, *k, *v, *attended, *sum, *gate, *up, *packed, *integers, *partials;
  // Of layers with experts. Each has its own grouping: a late thread may still look at an earlier layer's.
  float *normed, *logits, *shares, *expert_gates, *expert_ups, *expert_sums;
  std::vector<int> expert_ids;
  std::vector<Grouping> groupings;
  RowChanges changes;
  std::size_t own_changes = 0;  // where a thread's private floats for them begin

 private:
  void plan();
  void place();
  // Makes the groupings; the floats of the arrays from `normed` to `expert_sums`, and of `packed` at least.
  void place_experts(std::size_t* sizes, std::size_t& packing);
};

}  // namespace mlxserve
