// Where the keys and values of a block lie in quantized pages. Included by attention.h alone.

struct QuantizedHeads {
  const uint8_t *keys, *values;
  long at;  // row of the position in its page
};

// Quantized page number `index` of the item's sequence, as far as it is the item's head; `at` a row of it.
INLINE QuantizedHeads heads_of(const Attention& a, const AttentionItem& item, long index, long at) {
  long page = a.block_tables[item.sequence * a.max_pages + index];
  long head = (page * a.kv_heads + item.kv_head) * a.page;
  return {(const uint8_t*)a.keys + head * kv_row_bytes(a.format, a.dim),
          (const uint8_t*)a.values + head * kv_row_bytes(a.format, a.value_dim), at};
}

INLINE QuantizedHeads heads_at(const Attention& a, const AttentionItem& item, long position) {
  return heads_of(a, item, position / a.page, position % a.page);
}

INLINE void prefetch_quantized(const Attention& a, const AttentionItem& item, long position, long end) {
  while (position < end) {
    QuantizedHeads heads = heads_at(a, item, position);
    long count = least(a.page - heads.at, KB);
    prefetch_head(a.format, heads.keys, a.page, a.dim, heads.at, count, true);
    prefetch_head(a.format, heads.values, a.page, a.value_dim, heads.at, count, false);
    position += count;
  }
}

// Whole pages line by line. Where pages and blocks do not begin together the part that it needs, at once.
static void look_ahead(const Attention& a, const AttentionItem& item, PackedBlock& block, long position, long end) {
  if (KB % a.page != 0) return prefetch_quantized(a, item, position, end);
  block.ahead_keys.lines = a.page * kv_row_bytes(a.format, a.dim) / 64;
  block.ahead_values.lines = a.page * kv_row_bytes(a.format, a.value_dim) / 64;
  for (; position < end; position += a.page) {
    QuantizedHeads heads = heads_at(a, item, position);
    block.ahead_keys.from[block.ahead_keys.count++] = (const char*)heads.keys;
    block.ahead_values.from[block.ahead_values.count++] = (const char*)heads.values;
  }
}

// Columns of kKvPageUnit rows of `groups` floats, KB apart.
INLINE void turn(const float* from, long groups, float* to) {
  for (long row = 0; row < kKvPageUnit; row += W, from += W * groups, to += W) {
    if (groups == 1) {
      store(to, load(from));
    } else if (groups == 2) {
      store(to, evens(load(from), load(from + W)));
      store(to + KB, odds(load(from), load(from + W)));
    } else if (groups == 4) {
      const vf a = load(from), b = load(from + W), c = load(from + 2 * W), d = load(from + 3 * W);
      store(to, evens(evens(a, b), evens(c, d)));
      store(to + KB, evens(odds(a, b), odds(c, d)));
      store(to + 2 * KB, odds(evens(a, b), evens(c, d)));
      store(to + 3 * KB, odds(odds(a, b), odds(c, d)));
    } else {
      for (long g = 0; g < groups; ++g)
        for (long l = 0; l < W; ++l) to[g * KB + l] = from[l * groups + g];
    }
  }
}

// Points a packed block to its keys and values. Units wholly outside of [from, to) get another one of the block:
// their scores are never used.
static void find_packed(const Attention& a, const AttentionItem& item, Block& block, float* scales) {
  const long key_bytes = a.page * kv_row_integers(a.format, a.dim);
  const long row = kv_row_integers(a.format, a.value_dim), groups = a.value_dim / kKvGroup;
  PackedBlock& packed = block.packed;
  packed.value_scales = scales, packed.value_biases = scales + groups * KB;
  const long first = block.from / kKvPageUnit, end = ceil_div(block.to, kKvPageUnit);
  const long position = block.begin + first * kKvPageUnit;
  long index = position / a.page, at = position % a.page;
  for (long u = first; u < end; ++u) {
    const QuantizedHeads heads = heads_of(a, item, index, at);
    packed.unit[u] = {heads.keys + at, (const float*)(heads.keys + key_bytes) + at, heads.values + at * row};
    const float* value_scales = (const float*)(heads.values + a.page * row) + at * groups;
    turn(value_scales, groups, scales + u * kKvPageUnit);
    if (a.format == Format::kv4)
      turn(value_scales + a.page * groups, groups, scales + groups * KB + u * kKvPageUnit);
    at += kKvPageUnit;
    if (at == a.page) at = 0, ++index;
  }
  for (long u = 0; u < kUnits; ++u)
    if (u < first || u >= end) packed.unit[u] = packed.unit[first];
}
