// How an attention call is cut into items. Used by every primitive that attends.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace mlxserve {

// An attention over `rows` query rows of `sequences`, with pools of `pages` pages.
struct AttentionCall {
  Attention a;
  long rows, sequences, pages;
  const int *q_starts, *kv_lens;

  // With a window, pages wholly behind it may have gone back to the pool.
  long first_page(long sequence) const {
    long num_rows = q_starts[sequence + 1] - q_starts[sequence];
    return a.window ? std::max(0L, kv_lens[sequence] - num_rows + 1 - a.window) / a.page : 0;
  }
  long num_keys(const AttentionItem& item) const { return item.first_position + item.num_rows; }
  long first_split(const AttentionItem& item) const {
    return a.window ? std::max(0L, item.first_position + 1 - a.window) / kSplit : 0;
  }
  long num_splits(const AttentionItem& item) const {
    return (num_keys(item) + kSplit - 1) / kSplit - first_split(item);
  }
};

// Throws std::invalid_argument where the values of the index arrays are impossible.
void check_attention(const AttentionCall& call);

// Longest first, so that no thread starts a long one when the others are done.
std::vector<AttentionItem> attention_items(const AttentionCall& call);

}  // namespace mlxserve
