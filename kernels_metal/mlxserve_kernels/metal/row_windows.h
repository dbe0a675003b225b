// Neighbouring rows of a matrix, 32 items at a time: lane l gets item 32 t + l of each row, t = 0, 1, …
//
// Rows lie one behind the other. Where a row ends inside a line of memory, reading each row from its own start touches
// lines in part, at both ends of each access. Ragged rows are therefore read as one range, in windows of 32 items that
// start at multiples of 32 items of the whole matrix; an item comes to its lane by a shuffle out of two windows, of which
// the first is held from the step before. The window in which a row ends and the next one begins is read once, at the
// start, and kept for the row's last step.
//
// A source has Item (with `from_lane`), `from(i)`, `read(i)` and `zero()`. Only the rows' own items are read.
template <typename Source, int Rows, bool IsRagged>
struct RowWindows {
  typedef typename Source::Item Item;

  Source source;
  int items, rows, begin, end;
  Item held[IsRagged ? Rows : 1], starts[IsRagged ? Rows : 1];

  // Items of row j, counted from the window in which the first row begins: from this one on.
  int start_of(int j) const thread { return begin + j * items; }

  Item read(int window, uint lane) const thread {
    const int at = window * 32 + int(lane);
    return at >= begin && at < end ? source.read(at) : Source::zero();
  }

  // `rows_there` of the rows from `row` on exist: fewer than Rows, or none, at a matrix's end.
  void start(int row, int rows_there, int items_a_row, uint lane) thread {
    items = items_a_row;
    rows = clamp(rows_there, 0, Rows);
    const size_t first = size_t(row) * items;
    begin = IsRagged ? int(first % 32) : 0;
    source = source.from(first - begin);
    if constexpr (IsRagged) {
      end = start_of(rows);
#pragma clang loop unroll(full)
      for (int j = 0; j < Rows; j++) {
        const int window = start_of(j) / 32;
        if (j > 0 && window == start_of(j - 1) / 32) starts[j] = starts[j - 1];
        else starts[j] = read(window, lane);
        held[j] = starts[j];
      }
    }
  }

  // Item 32 * t + lane of row j: t ascending from 0. Beyond a row's end it is any item, or zero.
  Item next(int j, int t, uint lane) thread {
    if constexpr (IsRagged) {
      const int window = start_of(j) / 32 + t + 1, border = start_of(j + 1) / 32, phase = start_of(j) % 32;
      Item behind = Source::zero();
      if (j + 1 == Rows || window < border) behind = read(window, lane);
      else if (window == border) behind = starts[j + 1];
      const Item given = int(lane) < phase ? behind : held[j];
      held[j] = behind;
      return given.from_lane(ushort((int(lane) + phase) % 32));
    } else {
      const int at = t * 32 + int(lane);
      return at < items && j < rows ? source.read(start_of(j) + at) : Source::zero();
    }
  }
};
