// The kernels of paged attention, over the tiles of attention.h.
//
// q [T, H, D]; pools, tails and tables as ops.paged_attention has them; sinks [H]; out [T, H, DV].

// Where a threadgroup works: heads of kv head `kv_head` from `first_head` on, `num_heads` of them.
struct HeadTile {
  int kv_head, first_head, num_heads;
};

// A kv head's `group` heads in tiles of `Heads`.
template <int Heads>
HeadTile head_tile(int index, int group) {
  const int tiles = (group + Heads - 1) / Heads, within = index % tiles * Heads;
  HeadTile tile;
  tile.kv_head = index / tiles;
  tile.first_head = tile.kv_head * group + within;
  tile.num_heads = min(Heads, group - within);
  return tile;
}

// What all threadgroups share.
template <typename T, typename KV>
struct AttentionInputs {
  const device T* q;
  const device KV* k_pool;
  const device KV* v_pool;
  const device KV* k_tail;
  const device KV* v_tail;
  const device int* block_tables;
  const device int* q_starts;
  const device int* kv_lens;
  const device float* params;  // scale, softcap
  int num_tokens, num_heads, num_kv_heads, num_sequences, max_pages;
};

template <typename T>
struct AttentionMemory {
  threadgroup T* queries;
  threadgroup float* maxima;
  threadgroup float* sums;
  threadgroup float* partial;
};

template <typename TileType, typename T, typename KV>
void set_up(
    thread TileType& tile, const thread AttentionInputs<T, KV>& in, const thread AttentionMemory<T>& memory,
    const thread TileRows& rows, const thread HeadTile& heads, uint thread_index) {
  tile.simdgroup_index = thread_index / 32;
  tile.pages.k_pool = in.k_pool;
  tile.pages.v_pool = in.v_pool;
  tile.pages.k_tail = in.k_tail;
  tile.pages.v_tail = in.v_tail;
  tile.pages.table = in.block_tables + size_t(rows.sequence) * in.max_pages;
  tile.pages.num_heads = in.num_kv_heads;
  tile.pages.head = heads.kv_head;
  tile.tokens = rows;
  tile.num_heads = heads.num_heads;
  tile.scale = in.params[0];
  tile.softcap = in.params[1];
  tile.queries = memory.queries;
  tile.maxima = memory.maxima;
  tile.sums = memory.sums;
  tile.partial = memory.partial;
  tile.load_queries(in.q, in.num_heads, heads.first_head, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Threadgroup (x, y): head tile x of all, tile y of rows.
template <typename TileType, typename T, typename KV, int DV, int Heads, int Tokens, bool HasSinks>
void attend_tile(
    const thread AttentionInputs<T, KV>& in, const thread AttentionMemory<T>& memory, const device float* sinks,
    device T* out, uint3 group, uint thread_index) {
  const TileRows rows = find_rows<Tokens>(in.q_starts, in.kv_lens, in.num_sequences, in.num_tokens, int(group.y));
  if (rows.count <= 0) return;
  const HeadTile heads = head_tile<Heads>(int(group.x), in.num_heads / in.num_kv_heads);
  TileType tile(thread_index % 32);
  Accumulated<TileType> total(0);
  if (rows.has_sequence(in.num_sequences)) {
    set_up(tile, in, memory, rows, heads, thread_index);
    for (int split = tile.begin() / split_keys; split * split_keys < tile.end(); split++) tile.split(split, total);
  } else {
    tile.simdgroup_index = thread_index / 32;
    tile.tokens = rows;
    tile.num_heads = heads.num_heads;
  }
  UNROLLED for (int n = 0; n < TileType::owned; n++) {
    const int row = tile.owned_row(n);
    if (!tile.has_row(row)) continue;
    const int token = TileType::token_of(row), head = heads.first_head + row % Heads;
    const bool is_zero = !rows.has_sequence(in.num_sequences) || rows.position + token < 0;
    if (HasSinks) total.state[n].merge_sink(sinks[head]);
    device T* to = out + (size_t(rows.first + token) * in.num_heads + head) * DV;
    UNROLLED for (int block = 0; block < TileType::value_blocks; block++) {
      constexpr int subs = TileType::ValuesOfLane::subs;
      const int column = tile.owned_column(block / subs, block % subs);
      const float value = HasSinks ? total.values[block][n] * total.state[n].kept : total.values[block][n];
      if (column < DV) to[column] = is_zero ? T(0) : T(value / total.state[n].sum);
    }
  }
}

// Threadgroup (x, y, z): head tile x of all, tile y of rows, split z. Writes nothing for a row that does not see the split.
template <typename TileType, typename T, typename KV, int DV, int Heads, int Tokens>
void attend_split(
    const thread AttentionInputs<T, KV>& in, const thread AttentionMemory<T>& memory, device float* sums,
    device float* stats, uint3 group, uint thread_index) {
  const TileRows rows = find_rows<Tokens>(in.q_starts, in.kv_lens, in.num_sequences, in.num_tokens, int(group.y));
  if (rows.count <= 0 || !rows.has_sequence(in.num_sequences)) return;
  TileType tile(thread_index % 32);
  tile.tokens = rows;
  const int split = int(group.z);
  if (!tile.is_loaded(split * split_keys, split_keys)) return;
  const HeadTile heads = head_tile<Heads>(int(group.x), in.num_heads / in.num_kv_heads);
  set_up(tile, in, memory, rows, heads, thread_index);
  Written<TileType, Heads, DV> parts;
  parts.sums = sums;
  parts.stats = stats;
  parts.first_row = (size_t(split) * in.num_tokens + rows.first) * in.num_heads + heads.first_head;
  parts.num_heads = in.num_heads;
  tile.split(split, parts);
}

// Thread (x, y, z): the x-th of the columns of part sums, head y of token z.
template <typename T, typename ValuesOfLane, int DV, int Window, bool HasSinks>
void merge_splits(
    const device float* sums, const device float* stats, const device int* q_starts, const device int* kv_lens,
    const device float* sinks, device T* out, int num_sequences, int num_tokens, int num_heads, uint3 at) {
  constexpr int subs = ValuesOfLane::subs, columns = ValuesOfLane::blocks * subs * 32;
  const int sub_block = int(at.x) / 32, column = ValuesOfLane::owned_column(sub_block / subs, sub_block % subs, at.x % 32);
  if (int(at.x) >= columns || column >= DV) return;
  const TileRows rows = find_rows<1>(q_starts, kv_lens, num_sequences, num_tokens, int(at.z));
  const size_t row = size_t(at.z) * num_heads + at.y;
  if (!rows.has_sequence(num_sequences) || rows.position < 0) {
    out[row * DV + column] = T(0);
    return;
  }
  Merged state;
  float value = 0;
  const int first = Window > 0 ? max(0, rows.position - Window + 1) / split_keys : 0;
  for (int split = first; split * split_keys <= rows.position; split++) {
    const size_t part = size_t(split) * num_tokens * num_heads + row;
    state.merge(stats[part * 2], stats[part * 2 + 1]);
    value = state.value(value, sums[part * columns + at.x]);
  }
  if (HasSinks) {
    state.merge_sink(sinks[at.y]);
    value *= state.kept;
  }
  out[row * DV + column] = T(value / state.sum);
}
