#include "experts.h"

#include <cmath>

namespace mlxserve {

void route(const float* logits, long n, long top_k, bool is_normalized, int* ids, float* shares) {
  long count = 0;
  for (long i = 0; i < n; ++i) {
    if (count == top_k && !(logits[i] > logits[ids[count - 1]])) continue;
    long at = count < top_k ? count++ : count - 1;
    for (; at > 0 && logits[i] > logits[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = int(i);
  }
  float largest = logits[ids[0]], total = 0, chosen = 0;
  for (long i = 0; i < n; ++i) total += std::exp(logits[i] - largest);
  for (long j = 0; j < top_k; ++j) {
    shares[j] = std::exp(logits[ids[j]] - largest) / total;
    chosen += shares[j];
  }
  if (!is_normalized) return;
  for (long j = 0; j < top_k; ++j) shares[j] /= chosen;
}

Grouping::Grouping(long rows, long top_k, long experts)
    : rows(rows), top_k(top_k), experts(experts), pairs(rows * top_k), places(rows * top_k) {}

void Grouping::sort(const int* ids) {
  std::vector<long> next(experts + 1);
  for (std::size_t pair = 0; pair < pairs.size(); ++pair) ++next[ids[pair] + 1];
  groups.clear(), packed_places.clear();
  for (long expert = 0; expert < experts; ++expert) {
    long begin = next[expert], count = next[expert + 1];
    next[expert + 1] += begin;
    if (!count) continue;
    groups.push_back({expert, begin, count, long(packed_places.size())});
    if (groups.back().is_few()) continue;
    for (long i = 0; i < count; ++i) packed_places.push_back(int(begin + i));
    while (packed_places.size() % kernels().row_tile) packed_places.push_back(-1);
  }
  for (std::size_t pair = 0; pair < pairs.size(); ++pair) {
    long place = next[ids[pair]]++;
    pairs[place] = int(pair), places[pair] = int(place);
  }
}

long Grouping::max_packed_rows() const {
  long total = rows * top_k, most_groups = std::min(experts, total / (kernels().block_rows + 1));
  return most_groups ? total + most_groups * (kernels().row_tile - 1) : 0;
}

std::size_t expert_scratch_floats(long k) {
  const Kernels& use = kernels();
  return std::max<std::size_t>(std::max(use.block_rows, use.row_tile) * k, use.panel_floats(k));
}

std::size_t expert_input_floats(const Grouping& grouping, long packed_rows, long k, bool is_tiled) {
  if (!is_tiled) return kernels().packed_floats(packed_rows, k);
  return kernels().digit_bytes(long(grouping.pairs.size()), k, num_digits()) / sizeof(float);
}

}  // namespace mlxserve
