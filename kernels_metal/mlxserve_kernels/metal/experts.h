// Products of rows with the matrices of experts of their choice: each chosen expert's weights are read once a tile of
// rows, those of others never. Behind matmul.h, whose order of arithmetic this has.
//
// A choice is a place in `ids`. The threadgroups of a choice whose expert was chosen before it end at once; the others
// serve all choices of that expert.

// Rows of a choice: x has one a choice, or one for `Choices` choices.
template <int Choices>
struct ChosenRows {
  const threadgroup int* list;
  int count;

  int x_row(int m) const thread { return list[m] / Choices; }
  int y_row(int m) const thread { return list[m]; }
};

// Without the rows before `first`.
template <typename U>
Matrix<U> rows_from(Matrix<U> all, size_t first, int size) {
  all.w += first * (size / 8 * U::bits);
  all.scales += first * (size / U::group);
  all.biases += first * (size / U::group);
  return all;
}

// y [choices, outputs]: row i is x's row of choice i times the matrix of expert ids[i], plus its bias. The other
// arguments are those of quantized_matmul; list: threadgroup memory of 16 * Simdgroups.
template <typename U, int Rows, int Simdgroups, int Choices, bool HasBias, typename T, typename I, typename B>
void gather_matmul(
    const device T* x,
    const device I* ids,
    Matrix<U> weights,
    const device B* bias,
    device T* y,
    int choices,
    int outputs,
    int size,
    threadgroup vec<T, 4>* tile,
    threadgroup int* list,
    uint3 group,
    uint simdgroup,
    uint lane) {
  const int n = (int(group.x) * Simdgroups + int(simdgroup)) * 4, p = int(group.y);
  if (!is_first(ids, p, lane)) return;
  Product<T, U, Rows, 4, 1, Simdgroups> product;
  if (!product.is_staged && n >= outputs) return;
  const size_t id = size_t(ids[p]);
  const Matrix<U> matrix = rows_from(weights, id * outputs, size);
  ChosenRows<Choices> rows;
  rows.list = list + simdgroup * 16;
  int total = 1;
  for (int served = 0; served < total; served += Rows) {
    total = find_members<Rows>(ids, choices, p, served, list + simdgroup * 16, lane);
    rows.count = min(total - served, Rows);
    product.run(&matrix, x, rows, n, outputs, size, tile, simdgroup, lane);
    if constexpr (HasBias) product.add_bias(bias + id * outputs, n, outputs);
    product.store(y, rows, n, outputs, lane);
  }
}

// y [choices, outputs] = activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias), by the experts of the choices.
template <typename U, int Rows, int Simdgroups, int Choices, bool HasBias, int A, typename T, typename I, typename B>
void expert_gate_up(
    const device T* x,
    const device I* ids,
    Matrix<U> gate,
    Matrix<U> up,
    const device B* gate_bias,
    const device B* up_bias,
    device T* y,
    int choices,
    int outputs,
    int size,
    threadgroup vec<T, 4>* tile,
    threadgroup int* list,
    uint3 group,
    uint simdgroup,
    uint lane) {
  const int n = (int(group.x) * Simdgroups + int(simdgroup)) * 2, p = int(group.y);
  if (!is_first(ids, p, lane)) return;
  Product<T, U, Rows, 2, 2, Simdgroups> product;
  if (!product.is_staged && n >= outputs) return;
  const size_t id = size_t(ids[p]);
  const Matrix<U> matrices[2] = {
      rows_from(gate, id * outputs, size),
      rows_from(up, id * outputs, size),
  };
  ChosenRows<Choices> rows;
  rows.list = list + simdgroup * 16;
  int total = 1;
  for (int served = 0; served < total; served += Rows) {
    total = find_members<Rows>(ids, choices, p, served, list + simdgroup * 16, lane);
    rows.count = min(total - served, Rows);
    product.run(matrices, x, rows, n, outputs, size, tile, simdgroup, lane);
    if constexpr (HasBias) {
      product.add_bias(gate_bias + id * outputs, n, outputs);
      product.template add_bias<1>(up_bias + id * outputs, n, outputs);
    }
    product.template gate<A>();
    product.store(y, rows, n, outputs, lane);
  }
}
