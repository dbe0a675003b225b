// x @ dequantize(w).T for a few rows of x: each byte of the weights is read once a tile of rows.
//
// A simdgroup computes `Outputs` neighbouring outputs, of one weight matrix or of two, for up to `Rows` rows. Its lanes
// split K: lane l adds the products of the values 256 i + 8 l to 256 i + 8 l + 7, i ascending, and simd_sum adds the
// lanes. Neither the number of rows nor where x is read from changes that order, so a row's bits are its own.
//
// From 4 rows on x comes through threadgroup memory, 256 values of each row at a time, for all simdgroups.
//
// Rows of weights that end inside a 64-byte line are read as one range of memory (row_windows.h); so are their scales,
// where a row has at most 32 by the whole threadgroup through threadgroup memory.

constant constexpr int kStep = 256;

// The weights of one matrix, rows of `size` values.
template <typename U>
struct Matrix {
  const device uchar* w;
  const device typename U::Scale* scales;
  const device typename U::Scale* biases;
};

// Where scales come from: each row's own lines, one range of a simdgroup's rows, or one of the threadgroup's rows.
enum ScaleSource { own_lines, one_range, shared_range };

// Eight weights an item, from `w` on.
template <typename U>
struct WeightItems {
  typedef typename U::Raw Item;
  const device uchar* w;

  WeightItems<U> from(size_t i) const thread { return {w + i * U::bits}; }
  Item read(int i) const thread { return Item::read(w, i * 8); }
  static Item zero() { return Item::zero(); }
};

// Scale and bias of a group.
template <typename U>
struct ScaleItems {
  struct Item {
    float scale, bias;

    Item from_lane(ushort lane) const thread { return {simd_shuffle(scale, lane), simd_shuffle(bias, lane)}; }
  };
  const device typename U::Scale* scales;
  const device typename U::Scale* biases;

  ScaleItems<U> from(size_t i) const thread { return {scales + i, biases + i}; }
  Item read(int i) const thread { return {U::read_scale(scales, i), U::read_bias(biases, i)}; }
  static Item zero() { return {0, 0}; }
};

// One matrix, or gate and up, and their biases.
template <typename U, typename B, int N>
struct Operands {
  Matrix<U> matrices[N];
  const device B* biases[N];
};

// A tile of neighbouring rows of x and y.
struct NeighbourRows {
  int first;
  int count;

  int x_row(int m) const thread { return first + m; }
  int y_row(int m) const thread { return first + m; }
};

template <typename T>
void read_eight(const device T* from, thread float* x) {
  const vec<T, 4> a = *(const device vec<T, 4>*)from;
  const vec<T, 4> b = *(const device vec<T, 4>*)(from + 4);
  for (int i = 0; i < 4; i++) x[i] = float(a[i]), x[i + 4] = float(b[i]);
}

template <typename T>
void read_eight(const threadgroup vec<T, 4>* from, thread float* x) {
  const vec<T, 4> a = from[0], b = from[1];
  for (int i = 0; i < 4; i++) x[i] = float(a[i]), x[i + 4] = float(b[i]);
}

// The products of one simdgroup: U reads the weights, `Outputs` rows of each of `Matrices` matrices.
template <typename T, typename U, int Rows, int Outputs, int Matrices, int Simdgroups, bool IsRagged, int Scales>
struct Product {
  typedef RowWindows<WeightItems<U>, Outputs, IsRagged> Weights;
  typedef RowWindows<ScaleItems<U>, Outputs, Scales == one_range> Groups;
  static constexpr constant int width = Outputs * Matrices;
  static constexpr constant bool is_staged = Rows >= 4;
  static constexpr constant int shared_scales = 32 * Outputs * Simdgroups;

  float sums[width][Rows];

  // Adds the products of eight values of x with the rows' weights, in their order.
  void add(int m, const thread float* x, const thread float* w) thread {
    for (int j = 0; j < width; j++)
      for (int i = 0; i < 8; i++) sums[j][m] = fma(w[j * 8 + i], x[i], sums[j][m]);
  }

  // Values k to k + kStep - 1 of the rows go to `tile`, by all threads.
  template <typename R>
  void stage(const device T* x, R rows, int size, int k, threadgroup vec<T, 4>* tile, uint simdgroup, uint lane) thread {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int at = k + int(lane) * 8;
    for (int m = int(simdgroup); m < rows.count && at < size; m += Simdgroups) {
      const device T* from = x + size_t(rows.x_row(m)) * size + at;
      threadgroup vec<T, 4>* to = tile + (m * kStep + lane * 8) / 4;
      to[0] = *(const device vec<T, 4>*)from;
      to[1] = *(const device vec<T, 4>*)(from + 4);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  static void share_scale(
      const thread Matrix<U>& matrix, int m, size_t first, int i, threadgroup typename U::Scale* to) {
    to[2 * m * shared_scales + i] = matrix.scales[first + i];
    if constexpr (U::has_bias) to[(2 * m + 1) * shared_scales + i] = matrix.biases[first + i];
  }

  // The scales, then the biases, of all the threadgroup's outputs, at most 32 each; `n`: the first of them.
  void share_scales(
      const thread Matrix<U>* matrices, int n, int outputs, int groups, threadgroup typename U::Scale* to,
      uint thread_index) thread {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const size_t first = size_t(n) * groups;
    const int count = max(0, min(outputs - n, Outputs * Simdgroups)) * groups, lines = 32 - int(first % 32);
    for (int m = 0; m < Matrices; m++) {
      // Up to where 32 begin, by the last simdgroup; then whole ones.
      const int head = int(thread_index) - 32 * (Simdgroups - 1) - (32 - lines);
      if (head >= 0 && head < min(lines, count)) share_scale(matrices[m], m, first, head, to);
      for (int i = int(thread_index) + lines; i < count; i += 32 * Simdgroups) share_scale(matrices[m], m, first, i, to);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Outputs n to n + Outputs - 1, those that there are. All simdgroups of the threadgroup come here, with one `rows`.
  template <typename R>
  void run(
      const thread Matrix<U>* matrices,
      const device T* x,
      R rows,
      int n,
      int outputs,
      int size,
      threadgroup vec<T, 4>* tile,
      threadgroup typename U::Scale* shared,
      uint simdgroup,
      uint lane) thread {
    for (int j = 0; j < width; j++)
      for (int m = 0; m < Rows; m++) sums[j][m] = 0;
    const int groups = size / U::group, outputs_there = outputs - n;
    if constexpr (Scales == shared_range)
      share_scales(matrices, n - int(simdgroup) * Outputs, outputs, groups, shared, simdgroup * 32 + lane);
    if (!is_staged && outputs_there <= 0) return;
    Weights weights[Matrices];
    Groups of_groups[Matrices];
    for (int m = 0; m < Matrices; m++) {
      weights[m].source.w = matrices[m].w;
      weights[m].start(n, outputs_there, size / 8, lane);
      of_groups[m].source.scales = matrices[m].scales;
      of_groups[m].source.biases = matrices[m].biases;
      if constexpr (Scales != shared_range) of_groups[m].start(n, outputs_there, groups, lane);
    }
    for (int chunk = 0; chunk < size; chunk += 32 * U::group) {
      // A lane holds the scale of one of 32 groups.
      typename ScaleItems<U>::Item scales[width];
#pragma clang loop unroll(full)
      for (int j = 0; j < width; j++) {
        if constexpr (Scales == shared_range) {
          const bool is_there = int(lane) < groups && j % Outputs < outputs_there;
          const threadgroup typename U::Scale* of_matrix = shared + j / Outputs * 2 * shared_scales;
          const int at = is_there ? (int(simdgroup) * Outputs + j % Outputs) * groups + int(lane) : 0;
          scales[j].scale = is_there ? U::read_scale(of_matrix, at) : 0.0f;
          scales[j].bias = is_there ? U::read_bias(of_matrix + shared_scales, at) : 0.0f;
        } else {
          scales[j] = of_groups[j / Outputs].next(j % Outputs, chunk / U::group / 32, lane);
        }
      }
      const int end = min(size, chunk + 32 * U::group);
      for (int step = chunk; step < end; step += kStep) {
        const int k = step + int(lane) * 8;
        typename U::Raw raw[width];
#pragma clang loop unroll(full)
        for (int j = 0; j < width; j++) raw[j] = weights[j / Outputs].next(j % Outputs, step / kStep, lane);
        if constexpr (is_staged) stage(x, rows, size, step, tile, simdgroup, lane);
        float w[width * 8];
        const ushort holder = ushort((k - chunk) / U::group);
        for (int j = 0; j < width; j++) {
          const typename ScaleItems<U>::Item own = scales[j].from_lane(holder);
          U::values(raw[j], own.scale, own.bias, w + j * 8);
        }
        if (k >= size) continue;
#pragma clang loop unroll(full)
        for (int m = 0; m < Rows; m++) {
          if (m < rows.count) {
            float values[8];
            if constexpr (is_staged) read_eight(tile + (m * kStep + lane * 8) / 4, values);
            else read_eight(x + size_t(rows.x_row(m)) * size + k, values);
            add(m, values, w);
          }
        }
      }
    }
#pragma clang loop unroll(full)
    for (int m = 0; m < Rows; m++)
      if (m < rows.count)
        for (int j = 0; j < width; j++) sums[j][m] = simd_sum(sums[j][m]);
  }

  // To the outputs of a matrix.
  template <int Which = 0, typename B>
  void add_bias(const device B* bias, int n, int outputs) thread {
    for (int i = 0; i < Outputs; i++)
      if (n + i < outputs)
        for (int m = 0; m < Rows; m++) sums[Which * Outputs + i][m] += float(bias[n + i]);
  }

  // The first matrix's outputs become activation(first) * second.
  template <int A>
  void gate() thread {
    for (int i = 0; i < Outputs; i++)
      for (int m = 0; m < Rows; m++) sums[i][m] = activated<A>(sums[i][m]) * sums[Outputs + i][m];
  }

  // The sums become results: those of two matrices activation(first) * second. Biases lie from `first` on.
  template <bool HasBias, int A, typename B>
  void finish(const thread Operands<U, B, Matrices>& in, size_t first, int n, int outputs) thread {
    if constexpr (HasBias) {
      add_bias(in.biases[0] + first, n, outputs);
      if constexpr (Matrices == 2) add_bias<1>(in.biases[1] + first, n, outputs);
    }
    if constexpr (Matrices == 2) gate<A>();
  }

  // Output n + i of row m is sums[i][m]. Lanes store 32 of them at a time.
  template <typename R>
  void store(device T* y, R rows, int n, int outputs, uint lane) const thread {
#pragma clang loop unroll(full)
    for (int first = 0; first < Rows * Outputs; first += 32) {
      float mine = 0;
#pragma clang loop unroll(full)
      for (int i = 0; i < 32; i++)
        if (first + i < Rows * Outputs && int(lane) == i) mine = sums[(first + i) % Outputs][(first + i) / Outputs];
      const int m = (first + int(lane)) / Outputs, at = n + (first + int(lane)) % Outputs;
      if (m < rows.count && at < outputs) y[size_t(rows.y_row(m)) * outputs + at] = T(mine);
    }
  }
};

template <typename U, typename W>
Matrix<U> matrix_of(const device W* w, const device typename U::Scale* scales, const device typename U::Scale* biases) {
  Matrix<U> m;
  m.w = (const device uchar*)w;
  m.scales = scales;
  m.biases = biases;
  return m;
}

template <typename U, typename B>
Operands<U, B, 1> one(Matrix<U> weights, const device B* bias) {
  Operands<U, B, 1> in;
  in.matrices[0] = weights;
  in.biases[0] = bias;
  return in;
}

template <typename U, typename B>
Operands<U, B, 2> pair(Matrix<U> gate, Matrix<U> up, const device B* gate_bias, const device B* up_bias) {
  Operands<U, B, 2> in;
  in.matrices[0] = gate;
  in.matrices[1] = up;
  in.biases[0] = gate_bias;
  in.biases[1] = up_bias;
  return in;
}

inline NeighbourRows tile_rows(int tile, int rows_a_tile, int rows) {
  NeighbourRows result;
  result.first = tile * rows_a_tile;
  result.count = min(rows_a_tile, rows - result.first);
  return result;
}

// y [rows, outputs] = x [rows, size] @ weights.T + bias, or activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias).
// tile: threadgroup memory of Rows * kStep values from 4 rows on. A threadgroup of `Simdgroups` simdgroups computes
// 4 / N * Simdgroups outputs of Rows rows; `group` is its place. shared: threadgroup memory of 256 * Simdgroups scales
// where Scales is shared_range.
template <int Rows, int Simdgroups, bool IsRagged, int Scales, bool HasBias, int A, typename U, int N, typename T, typename B>
void multiply_tile(
    const device T* x,
    Operands<U, B, N> in,
    device T* y,
    int rows,
    int outputs,
    int size,
    threadgroup vec<T, 4>* tile,
    threadgroup typename U::Scale* shared,
    uint3 group,
    uint simdgroup,
    uint lane) {
  const int n = (int(group.x) * Simdgroups + int(simdgroup)) * (4 / N);
  const NeighbourRows row_tile = tile_rows(int(group.y), Rows, rows);
  Product<T, U, Rows, 4 / N, N, Simdgroups, IsRagged, Scales> product;
  if (!product.is_staged && Scales != shared_range && n >= outputs) return;
  product.run(in.matrices, x, row_tile, n, outputs, size, tile, shared, simdgroup, lane);
  product.template finish<HasBias, A>(in, 0, n, outputs);
  product.store(y, row_tile, n, outputs, lane);
}
