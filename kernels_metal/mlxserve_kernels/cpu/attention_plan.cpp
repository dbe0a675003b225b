#include "attention_plan.h"

#include "primitive.h"

namespace mlxserve {
namespace {

constexpr long kItemRows = 48;  // pairs of row and head that share each gathered block of keys and values

}  // namespace

void check_attention(const AttentionCall& call) {
  const char* op = "paged_attention";
  require(call.q_starts[0] == 0, op, ": q_starts[0] must be 0, got ", call.q_starts[0]);
  for (long s = 0; s < call.sequences; ++s) {
    long rows = call.q_starts[s + 1] - call.q_starts[s], keys = call.kv_lens[s];
    require(rows >= 0 && call.q_starts[s + 1] <= call.rows, op, ": q_starts must ascend to at most ", call.rows,
            ", got ", call.q_starts[s + 1], " at ", s + 1);
    if (rows == 0) continue;
    require(keys >= rows && keys <= call.a.max_pages * call.a.page, op, ": kv_lens[", s, "] is ", keys,
            ", must be from its ", rows, " rows to the ", call.a.max_pages * call.a.page, " slots of its block table");
    for (long i = call.first_page(s); i * call.a.page < keys; ++i) {
      int page = call.a.block_tables[s * call.a.max_pages + i];
      require(page >= 0 && page < call.pages, op, ": block_tables[", s, ", ", i, "] is ", page, ", the pool has ",
              call.pages, " pages");
    }
  }
}

std::vector<AttentionItem> attention_items(const AttentionCall& call) {
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

}  // namespace mlxserve
