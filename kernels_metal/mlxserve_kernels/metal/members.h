// The rows that share a key: of an expert, of an adapter. Each simdgroup finds them for itself.

// Whether no key before place p equals that at p.
template <typename I>
bool is_first(const device I* keys, int p, uint lane) {
  bool is_seen = false;
  for (int q = int(lane); q < p; q += 32) is_seen = is_seen || keys[q] == keys[p];
  return !simd_any(is_seen);
}

// The places of the key at p, from p on, without the first `skipped` ones, at most `Most` of them: to `list`, the
// simdgroup's own threadgroup memory. Returns how many there are with the skipped ones and those that did not fit.
template <int Most, typename I>
int find_members(const device I* keys, int total, int p, int skipped, threadgroup int* list, uint lane) {
  simdgroup_barrier(mem_flags::mem_threadgroup);
  int found = 0;
  for (int begin = p; begin < total; begin += 32) {
    const int q = begin + int(lane);
    const int is_member = q < total && keys[q] == keys[p] ? 1 : 0;
    const int rank = found + simd_prefix_exclusive_sum(is_member) - skipped;
    if (is_member && rank >= 0 && rank < Most) list[rank] = q;
    found += simd_sum(is_member);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  return found;
}
