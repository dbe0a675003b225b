// Rows of keys and values into pages. Needs rope.h.
//
// A threadgroup takes some rows of one head, `Slots` at most. First each simdgroup encodes rows, one after the other, into a
// tile in threadgroup memory: what the page holds of a row, as raw bits. Then all threads carry the tile to the page in
// the page's own order, so that neighbouring threads touch neighbouring bytes.
//
// A page of a head is sections one behind the other: units (values as bits of P, or bytes of integers), then, quantized,
// float scales and, with 4 bits, float biases, one for 32 values. Keys are stored transposed: item i of all slots side by
// side; values row by row. quantized_pages.py has the format.

template <typename P, typename Unit, typename Word, int KvBits, int D, int Page, int Slots, int Threads, bool IsKeys>
struct PageRows {
  static constexpr constant int units = KvBits == 0 ? D : D * KvBits / 8;
  static constexpr constant int groups = KvBits == 0 ? 0 : D / 32;
  static constexpr constant int floats = KvBits == 4 ? 2 * groups : groups;
  static constexpr constant int head_size = Page * (units + 4 * floats);
  // Items of a Word, which a thread moves at once.
  static constexpr constant int width = sizeof(Word) / sizeof(Unit);
  // Odd in words: neighbouring slots are in different banks.
  static constexpr constant int unit_stride = units + 4 / sizeof(Unit);
  static constexpr constant int float_stride = floats + 1;

  threadgroup Unit* unit_tile;
  threadgroup uint* float_tile;

  static constexpr constant int no_source = 0x7fffffff;

  // Values of one group of 32, one a lane. All steps as in quantized_pages.pack_rows.
  void encode_group(float x, int group, threadgroup Unit* integers, threadgroup uint* scales, uint lane) const thread {
    const float low = simd_min(x), high = simd_max(x);
    const float span = KvBits == 8 ? simd_max(metal::abs(x)) : high - low;
    const bool is_finite = simd_all(metal::isfinite(x) && metal::isfinite(span));
    const float nan = as_type<float>(0x7fc00000u);
    const float scale = is_finite ? metal::precise::divide(span, KvBits == 8 ? 127.0f : 15.0f) : nan;
    const float divisor = is_finite && scale != 0 ? scale : 1.0f;
    const float shifted = !is_finite ? 0.0f : KvBits == 8 ? x : x - low;
    const float most = KvBits == 8 ? 127.0f : 15.0f, least = KvBits == 8 ? -127.0f : 0.0f;
    const int q = int(metal::rint(metal::clamp(metal::precise::divide(shifted, divisor), least, most)));
    if constexpr (KvBits == 8) {
      integers[group * 32 + lane] = Unit(q);
    } else {
      const int other = simd_shuffle_xor(q, ushort(16));
      if (lane < 16) integers[group * 16 + lane] = Unit(q | other << 4);
    }
    if (lane != 0) return;
    scales[group] = as_type<uint>(scale);
    if (KvBits == 4) scales[groups + group] = as_type<uint>(is_finite ? low : nan);
  }

  // A row in a simdgroup's threadgroup memory to place `slot` of the tile. A lane reads what load_row wrote by it.
  void encode(const threadgroup float* row, int slot, uint lane) const thread {
    threadgroup Unit* integers = unit_tile + slot * unit_stride;
    if constexpr (KvBits == 0) {
      for (int i = lane; i < D; i += 32) integers[i] = as_type<Unit>(P(row[i]));
    } else {
      for (int group = 0; group < groups; group++)
        encode_group(row[group * 32 + lane], group, integers, float_tile + slot * float_stride, lane);
    }
  }

  // Rows of x [rows, heads, D] to the tile: row first_row + i to place first_place + i.
  template <typename T, int Rotated, bool IsInterleaved, typename X, typename Positions, typename Frequencies>
  void encode_rows(
      X x,
      Positions positions,
      float position_scale,
      Frequencies inverse_frequencies,
      float input_scale,
      uint heads,
      uint head,
      int first_row,
      int first_place,
      int count,
      threadgroup float* row,
      uint simdgroup_index,
      uint lane) const thread {
    for (int i = simdgroup_index; i < count; i += Threads / 32) {
      load_row<D>(x + (size_t(first_row + i) * heads + head) * D, row, lane);
      if constexpr (IsKeys && Rotated != 0) {
        const float position = position_scale * float(positions[first_row + i]);
        rotate_row<T, Rotated, IsInterleaved>(row, position, inverse_frequencies, input_scale, lane);
      }
      encode(row, first_place + i, lane);
    }
  }

  // One section of a page's slots first_slot : first_slot + Slots, whole: slots begin : end, counted from there, come from
  // the tile, the others from `old`, or are 0 without it.
  template <typename Item, typename ItemWord, int Items>
  void merge_section(
      const threadgroup Item* tile,
      int stride,
      const device Item* old,
      bool has_old,
      device Item* page,
      int first_slot,
      int begin,
      int end,
      uint thread_index) const thread {
    constexpr int w = sizeof(ItemWord) / sizeof(Item);
    constexpr int row_words = (IsKeys ? Slots : Items) / w;
    for (int i = thread_index; i < Slots * Items / w; i += Threads) {
      const int inner = i % row_words * w, outer = i / row_words;
      const int slot = IsKeys ? inner : outer, item = IsKeys ? outer : inner;
      const int at = IsKeys ? item * Page + first_slot + slot : (first_slot + slot) * Items + item;
      const int last = IsKeys ? slot + w - 1 : slot;
      ItemWord word = 0;
      if (has_old && (slot < begin || last >= end)) word = *(const device ItemWord*)(old + at);
      for (int k = 0; k < w; k++) {
        const int s = IsKeys ? slot + k : slot;
        if (s < begin || s >= end) continue;
        const int shift = 8 * sizeof(Item) * k;
        const ItemWord bits = tile[s * stride + (IsKeys ? item : item + k)];
        word = ItemWord((word & ~(ItemWord(Item(~Item(0))) << shift)) | bits << shift);
      }
      *(device ItemWord*)(page + at) = word;
    }
  }

  // `page` and `old`: of one head, head_size units each.
  void merge(
      const device Unit* old,
      bool has_old,
      device Unit* page,
      int first_slot,
      int begin,
      int end,
      uint thread_index) const thread {
    merge_section<Unit, Word, units>(
        unit_tile, unit_stride, old, has_old, page, first_slot, begin, end, thread_index);
    if constexpr (KvBits != 0) {
      for (int first = 0; first < floats; first += groups) {
        const int skipped = Page * (units + 4 * first);
        merge_section<uint, uint, groups>(
            float_tile + first, float_stride, (const device uint*)(old + skipped), has_old,
            (device uint*)(page + skipped), first_slot, begin, end, thread_index);
      }
    }
  }

  // One section of `count` rows of the tile to slots of the pool. head_start: of this head in a page, in Items.
  template <typename Item, typename ItemWord, int Items>
  void scatter_section(
      const threadgroup Item* tile,
      int stride,
      device Item* pool,
      size_t page_stride,
      size_t head_start,
      const threadgroup int* slots,
      int count,
      uint thread_index) const thread {
    constexpr int w = sizeof(ItemWord) / sizeof(Item);
    const int row_words = IsKeys ? (count + w - 1) / w : Items / w;
    const int words = IsKeys ? row_words * Items : row_words * count;
    for (int i = thread_index; i < words; i += Threads) {
      const int inner = i % row_words * w, outer = i / row_words;
      const int row = IsKeys ? inner : outer, item = IsKeys ? outer : inner;
      bool is_word = !IsKeys || (slots[row] % w == 0 && row + w <= count);
      if constexpr (IsKeys)
        for (int k = 1; k < w; k++) is_word = is_word && slots[row + k] == slots[row] + k;
      ItemWord word = 0;
      for (int k = 0; k < w; k++) {
        if (IsKeys && row + k >= count) break;
        const Item bits = IsKeys ? tile[(row + k) * stride + item] : tile[row * stride + item + k];
        word = ItemWord(word | ItemWord(bits) << int(8 * sizeof(Item) * k));
        if (is_word) continue;
        pool[place<Items>(slots[row + k], item, page_stride, head_start)] = bits;
      }
      if (is_word) *(device ItemWord*)(pool + place<Items>(slots[row], item, page_stride, head_start)) = word;
    }
  }

  template <int Items>
  static size_t place(int slot, int item, size_t page_stride, size_t head_start) {
    const int in_page = slot % Page;
    return size_t(slot / Page) * page_stride + head_start + (IsKeys ? item * Page + in_page : in_page * Items + item);
  }

  // slots: of the rows of the tile; `Slots` entries, of which `count` are read.
  void scatter(
      device Unit* pool,
      uint heads,
      uint head,
      const threadgroup int* slots,
      int count,
      uint thread_index) const thread {
    const size_t page_stride = size_t(heads) * head_size, head_start = size_t(head) * head_size;
    scatter_section<Unit, Word, units>(
        unit_tile, unit_stride, pool, page_stride, head_start, slots, count, thread_index);
    if constexpr (KvBits != 0) {
      for (int first = 0; first < floats; first += groups) {
        const size_t skipped = Page * (units + 4 * first);
        scatter_section<uint, uint, groups>(
            float_tile + first, float_stride, (device uint*)(pool + skipped), page_stride / 4, head_start / 4, slots,
            count, thread_index);
      }
    }
  }
};

// Rows to the slots of a pool that is written in place. The threadgroup takes tile `tile` of the rows [rows, heads, D].
template <
    typename Codec, typename T, int Rotated, bool IsInterleaved, int Slots, int Threads, typename X, typename Positions,
    typename Frequencies, typename Mapping, typename Unit>
void write_rows(
    const thread Codec& codec,
    X x,
    Positions positions,
    float position_scale,
    Frequencies inverse_frequencies,
    float input_scale,
    Mapping slot_mapping,
    device Unit* pool,
    int rows,
    uint heads,
    uint head,
    uint tile,
    threadgroup int* slots,
    threadgroup float* row,
    uint thread_index) {
  const int first = tile * Slots, count = metal::min(Slots, rows - first);
  if (int(thread_index) < count) slots[thread_index] = slot_mapping[first + thread_index];
  codec.template encode_rows<T, Rotated, IsInterleaved>(
      x, positions, position_scale, inverse_frequencies, input_scale, heads, head, first, 0, count, row,
      thread_index / 32, thread_index % 32);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  codec.scatter(pool, heads, head, slots, count, thread_index);
}

// Slots first_slot : first_slot + Slots of one new tail. piece: source, first new slot, number of new rows, first row. The
// source is a page of the pool, or -1 - r for row r of the old tails, or no_source.
template <
    typename Codec, typename T, int Rotated, bool IsInterleaved, int Slots, int Threads, typename X, typename Positions,
    typename Frequencies, typename Unit>
void write_tail(
    const thread Codec& codec,
    X x,
    Positions positions,
    float position_scale,
    Frequencies inverse_frequencies,
    float input_scale,
    const device int* piece,
    const device Unit* pool,
    const device Unit* old_tails,
    device Unit* tails,
    uint heads,
    uint head,
    uint tail,
    int first_slot,
    threadgroup float* row,
    uint thread_index) {
  const int source = piece[0];
  const int begin = metal::clamp(piece[1] - first_slot, 0, Slots);
  const int end = metal::clamp(piece[1] + piece[2] - first_slot, 0, Slots);
  codec.template encode_rows<T, Rotated, IsInterleaved>(
      x, positions, position_scale, inverse_frequencies, input_scale, heads, head,
      piece[3] + first_slot + begin - piece[1], begin, end - begin, row, thread_index / 32, thread_index % 32);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const bool has_old = source != Codec::no_source;
  const size_t head_size = Codec::head_size;
  const device Unit* old = source < 0 ? old_tails + (size_t(-1 - source) * heads + head) * head_size
                                      : pool + (size_t(has_old ? source : 0) * heads + head) * head_size;
  codec.merge(old, has_old, tails + (size_t(tail) * heads + head) * head_size, first_slot, begin, end, thread_index);
}

// A head of a page, `Words` words.
template <typename Word, int Words, int Threads>
void copy_head(const device Word* source, device Word* target, uint thread_index) {
  for (int i = thread_index; i < Words; i += Threads) target[i] = source[i];
}
