// scale * (x @ a) @ b for rows with different adapters and none, in two kernels: pieces of x @ a, then their sum times b.
// Behind members.h: each adapter that rows have is read once a tile of `Rows` rows, the others never.
//
// Order of a sum: a piece is 256 values of x, those of one lane ascending, then lanes by halves; pieces ascending; rows
// of b ascending. A row's bits do not depend on the rows beside it.

constant constexpr int kPiece = 256;

constexpr int power_of_two(int least) {
  int power = 1;
  while (power < least && power < 32) power *= 2;
  return power;
}

// How the lanes of a simdgroup share rows of `Rank` values: `width` neighbours a lane, `lanes` lanes a row.
template <int Rank>
struct RankLanes {
  static constexpr constant int width = Rank % 4 == 0 ? 4 : 1;
  static constexpr constant int lanes = power_of_two((Rank + width - 1) / width);
  static constexpr constant int columns = lanes * width;
};

template <int Width, typename T>
void read_wide(const device T* from, thread float* values) {
  if constexpr (Width == 4) {
    const vec<T, 4> v = *(const device vec<T, 4>*)from;
    for (int i = 0; i < 4; i++) values[i] = float(v[i]);
  } else {
    values[0] = float(*from);
  }
}

// partial [pieces, rows, Rank]: x [rows, size] @ a[slots[row]], a [adapters, size, Rank], of one piece of x each; 0 for a
// row without adapter. A simdgroup has a piece (group.x, simdgroup) of the rows that share row group.y's adapter, and
// RankLanes::columns columns (group.z). list: the simdgroup's own threadgroup memory of Rows.
template <int Rank, int Rows, int Simdgroups, typename T, typename A>
void low_rank_inner(
    const device T* x,
    const device A* a,
    const device int* slots,
    device float* partial,
    int rows,
    int size,
    threadgroup int* list,
    uint3 group,
    uint simdgroup,
    uint lane) {
  typedef RankLanes<Rank> Lanes;
  constexpr int width = Lanes::width;
  const int p = int(group.y), piece = int(group.x) * Simdgroups + int(simdgroup);
  const int begin = piece * kPiece, end = min(begin + kPiece, size);
  const int column = int(group.z) * Lanes::columns + int(lane) % Lanes::lanes * width;
  if (begin >= size) return;
  const bool is_stored = int(lane) < Lanes::lanes && column < Rank;
  device float* to = partial + size_t(piece) * rows * Rank + column;
  if (slots[p] < 0) {
    for (int i = 0; i < width && is_stored; i++) to[size_t(p) * Rank + i] = 0;
    return;
  }
  if (!is_first(slots, p, lane)) return;
  const device A* matrix = a + size_t(slots[p]) * size * Rank;
  int total = 1;
  for (int served = 0; served < total; served += Rows) {
    total = find_members<Rows>(slots, rows, p, served, list, lane);
    const int count = min(total - served, Rows);
    float sums[Rows][width];
    for (int m = 0; m < Rows; m++)
      for (int i = 0; i < width; i++) sums[m][i] = 0;
    for (int k = begin + int(lane) / Lanes::lanes; k < end && column < Rank; k += 32 / Lanes::lanes) {
      float values[width];
      read_wide<width>(matrix + size_t(k) * Rank + column, values);
#pragma clang loop unroll(full)
      for (int m = 0; m < Rows; m++) {
        if (m < count) {
          const float factor = float(x[size_t(list[m]) * size + k]);
          for (int i = 0; i < width; i++) sums[m][i] = fma(factor, values[i], sums[m][i]);
        }
      }
    }
#pragma clang loop unroll(full)
    for (int m = 0; m < Rows; m++) {
      if (m < count) {
        for (int i = 0; i < width; i++) {
          for (int apart = Lanes::lanes; apart < 32; apart *= 2) sums[m][i] += simd_shuffle_xor(sums[m][i], ushort(apart));
          if (is_stored) to[size_t(list[m]) * Rank + i] = sums[m][i];
        }
      }
    }
  }
}

// y [rows, outputs] = scales[slot] * sum(partial) @ b[slot], b [adapters, Rank, outputs]; 0 for a row without adapter.
// `Width` outputs a thread, outputs a multiple of it. inner: threadgroup memory of Rows * kRanks floats; list: of Rows a
// simdgroup.
constant constexpr int kRanks = 64;

template <int Rank, int Rows, int Simdgroups, int Width, typename T, typename B>
void low_rank_outer(
    const device float* partial,
    const device B* b,
    const device int* slots,
    const device float* scales,
    device T* y,
    int pieces,
    int rows,
    int outputs,
    threadgroup float* inner,
    threadgroup int* list,
    uint3 group,
    uint simdgroup,
    uint lane) {
  const int p = int(group.y), thread_index = int(simdgroup * 32 + lane);
  const int n = (int(group.x) * Simdgroups * 32 + thread_index) * Width;
  if (slots[p] < 0) {
    for (int i = 0; i < Width && n < outputs; i++) y[size_t(p) * outputs + n + i] = T(0);
    return;
  }
  if (!is_first(slots, p, lane)) return;
  const device B* matrix = b + size_t(slots[p]) * Rank * outputs;
  int total = 1;
  for (int served = 0; served < total; served += Rows) {
    total = find_members<Rows>(slots, rows, p, served, list, lane);
    const int count = min(total - served, Rows);
    float sums[Rows][Width];
    for (int m = 0; m < Rows; m++)
      for (int i = 0; i < Width; i++) sums[m][i] = 0;
    for (int first = 0; first < Rank; first += kRanks) {
      const int ranks = min(Rank - first, kRanks);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = thread_index; i < count * ranks; i += Simdgroups * 32) {
        const device float* from = partial + size_t(list[i / ranks]) * Rank + first + i % ranks;
        float sum = 0;
        for (int piece = 0; piece < pieces; piece++) sum += from[size_t(piece) * rows * Rank];
        inner[i / ranks * kRanks + i % ranks] = sum;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int r = 0; r < ranks && n < outputs; r++) {
        float values[Width];
        read_wide<Width>(matrix + size_t(first + r) * outputs + n, values);
#pragma clang loop unroll(full)
        for (int m = 0; m < Rows; m++) {
          if (m < count)
            for (int i = 0; i < Width; i++) sums[m][i] = fma(inner[m * kRanks + r], values[i], sums[m][i]);
        }
      }
    }
    const float scale = scales[slots[p]];
#pragma clang loop unroll(full)
    for (int m = 0; m < Rows; m++)
      if (m < count && n < outputs)
        for (int i = 0; i < Width; i++) y[size_t(list[m]) * outputs + n + i] = T(scale * sums[m][i]);
  }
}
