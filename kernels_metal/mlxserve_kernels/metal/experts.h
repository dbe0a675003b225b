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

// y [choices, outputs]: row i is the result of multiply_tile for x's row of choice i and the matrices of expert ids[i];
// its arguments, and list: threadgroup memory of 16 * Simdgroups.
template <
    int Rows, int Simdgroups, int Choices, bool IsRagged, int Scales, bool HasBias, int A, typename U, int N, typename T, typename I, typename B>
void multiply_chosen(
    const device T* x,
    const device I* ids,
    Operands<U, B, N> all,
    device T* y,
    int choices,
    int outputs,
    int size,
    threadgroup vec<T, 4>* tile,
    threadgroup typename U::Scale* shared,
    threadgroup int* list,
    uint3 group,
    uint simdgroup,
    uint lane) {
  const int n = (int(group.x) * Simdgroups + int(simdgroup)) * (4 / N), p = int(group.y);
  if (!is_first(ids, p, lane)) return;
  Product<T, U, Rows, 4 / N, N, Simdgroups, IsRagged, Scales> product;
  if (!product.is_staged && Scales != shared_range && n >= outputs) return;
  const size_t id = size_t(ids[p]);
  Matrix<U> matrices[N];
  for (int j = 0; j < N; j++) matrices[j] = rows_from(all.matrices[j], id * outputs, size);
  ChosenRows<Choices> rows;
  rows.list = list + simdgroup * 16;
  int total = 1;
  for (int served = 0; served < total; served += Rows) {
    total = find_members<Rows>(ids, choices, p, served, list + simdgroup * 16, lane);
    rows.count = min(total - served, Rows);
    product.run(matrices, x, rows, n, outputs, size, tile, shared, simdgroup, lane);
    product.template finish<HasBias, A>(all, id * outputs, n, outputs);
    product.store(y, rows, n, outputs, lane);
  }
}
