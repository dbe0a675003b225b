// Rotary positions on rows that a simdgroup holds in threadgroup memory.
//
//   (a, b) = input_scale * (a, b), rounded to T; (a cos - b sin, a sin + b cos), rounded to T
//
// with the angle position * inverse_frequencies[pair], for the first `Rotated` values of a row. A pair is two halves of
// these or, IsInterleaved, two neighbours.

// X, Positions, Frequencies and the like are pointers: small arrays come in another address space.

// row: D floats of this simdgroup, its own alone.
template <int D, typename X>
void load_row(X x, threadgroup float* row, uint lane) {
  for (int i = lane; i < D; i += 32) row[i] = float(x[i]);
}

template <typename T, int D>
void store_row(const threadgroup float* row, device T* y, uint lane) {
  for (int i = lane; i < D; i += 32) y[i] = T(row[i]);
}

// Behind it all lanes see the rotated row. `precise`: angles reach the context's length, where fast sines are wrong.
template <typename T, int Rotated, bool IsInterleaved, typename Frequencies>
void rotate_row(
    threadgroup float* row,
    float position,
    Frequencies inverse_frequencies,
    float input_scale,
    uint lane) {
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int pair = lane; pair < Rotated / 2; pair += 32) {
    const int first = IsInterleaved ? 2 * pair : pair;
    const int second = IsInterleaved ? first + 1 : first + Rotated / 2;
    const float angle = position * inverse_frequencies[pair];
    const float c = metal::precise::cos(angle), s = metal::precise::sin(angle);
    const float a = float(T(input_scale * row[first])), b = float(T(input_scale * row[second]));
    row[first] = float(T(a * c - b * s));
    row[second] = float(T(a * s + b * c));
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Rows of q, one a simdgroup: x, y [count, D], head h of token t being row t * heads + h. row: as above.
template <typename T, int D, int Rotated, bool IsInterleaved, typename X, typename Positions, typename Frequencies>
void rotate_rows(
    X x,
    device T* y,
    Positions positions,
    float position_scale,
    Frequencies inverse_frequencies,
    float input_scale,
    uint heads,
    uint count,
    threadgroup float* row,
    uint index,
    uint lane) {
  if (index >= count) return;
  const size_t start = size_t(index) * D;
  load_row<D>(x + start, row, lane);
  const float position = position_scale * float(positions[index / heads]);
  rotate_row<T, Rotated, IsInterleaved>(row, position, inverse_frequencies, input_scale, lane);
  store_row<T, D>(row, y + start, lane);
}
