// Residual add and RMS norm of a row in one pass over it.
//
//   sum = x + residual (rounded to T), y = sum / sqrt(mean(sum^2) + eps) * weight
//
// One threadgroup of `Threads` threads a row: a row's bits do not depend on the rows beside it. Values stay in registers
// between the two passes, so each byte is read once. Where `Size` is a multiple of 4, x, residual, weight, y and sum start
// at a multiple of 4 elements.

template <typename T, int Size, int Threads>
struct RowInRegisters {
  static constexpr constant int width = Size % 4 == 0 ? 4 : 1;
  static constexpr constant int steps = (Size / width + Threads - 1) / Threads;

  float values[steps * width];

  // The index of a thread's step-th group of `width` values; at least Size where it has none.
  static int at(int step, uint thread_index) {
    return (step * Threads + int(thread_index)) * width;
  }

  void load(const device T* row, uint thread_index) thread {
    for (int step = 0; step < steps; step++) {
      const int i = at(step, thread_index);
      for (int k = 0; k < width; k++) values[step * width + k] = 0;
      if (i >= Size) continue;
      if constexpr (width == 4) {
        const vec<T, 4> v = *(const device vec<T, 4>*)(row + i);
        for (int k = 0; k < 4; k++) values[step * 4 + k] = float(v[k]);
      } else {
        values[step] = float(row[i]);
      }
    }
  }

  // values = T(values + row), so that what is normalized is what the next layer adds to.
  void add(const device T* row, uint thread_index) thread {
    RowInRegisters<T, Size, Threads> other;
    other.load(row, thread_index);
    for (int j = 0; j < steps * width; j++) values[j] = float(T(values[j] + other.values[j]));
  }

  float sum_of_squares() const thread {
    float sum = 0;
    for (int j = 0; j < steps * width; j++) sum += values[j] * values[j];
    return sum;
  }

  void store(device T* row, uint thread_index) const thread {
    for (int step = 0; step < steps; step++) {
      const int i = at(step, thread_index);
      if (i >= Size) continue;
      if constexpr (width == 4) {
        vec<T, 4> v;
        for (int k = 0; k < 4; k++) v[k] = T(values[step * 4 + k]);
        *(device vec<T, 4>*)(row + i) = v;
      } else {
        row[i] = T(values[step]);
      }
    }
  }

  template <typename W>
  void scale(float factor, const device W* weight, uint thread_index) thread {
    RowInRegisters<W, Size, Threads> w;
    w.load(weight, thread_index);
    for (int j = 0; j < steps * width; j++) values[j] = values[j] * factor * w.values[j];
  }
};

// partial: threadgroup memory of 32 floats. thread_index counts the threadgroup's Threads threads.
template <typename T, typename W, int Size, int Threads>
void add_rms_norm(
    const device T* x,
    const device T* residual,
    const device W* weight,
    float eps,
    device T* y,
    device T* sum,
    threadgroup float* partial,
    uint row,
    uint thread_index) {
  const size_t start = size_t(row) * Size;
  RowInRegisters<T, Size, Threads> values;
  values.load(x + start, thread_index);
  values.add(residual + start, thread_index);
  values.store(sum + start, thread_index);

  const uint lane = thread_index % 32;
  const float squares = simd_sum(values.sum_of_squares());
  if (lane == 0) partial[thread_index / 32] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float total = simd_sum(lane < Threads / 32 ? partial[lane] : 0.0f);

  values.scale(metal::precise::rsqrt(total / Size + eps), weight, thread_index);
  values.store(y + start, thread_index);
}
