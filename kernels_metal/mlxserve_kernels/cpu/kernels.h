// The border between the MLX primitives and the kernels, which are compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mlxserve {

enum class Format {
  float32,
  float16,
  bfloat16,
  affine2,
  affine3,
  affine4,
  affine5,
  affine6,
  affine8,
  mxfp4,
  mxfp8,
  nvfp4,
  tiles4,
  tiles8,
  kv8,
  kv4,
};

// A matrix of N rows and K columns, row-major; scales and biases of quantized formats are [N, K / group]; mxfp4,
// mxfp8 and nvfp4 have no biases, and scales of 8 bits of their own kinds.
//
// The tiled formats are affine values in another order, all in `data`: tiles of kTile rows, in a tile its groups of
// columns, in a group its kTile scales, its kTile biases and its integers. Those of tiles8 are [group / 4][kTile][4]
// bytes; of tiles4 [group / 8][kTile][4] bytes, columns 8 i + j in the low halves, 8 i + 4 + j in the high ones.
struct Weight {
  Format format;
  long n, k;
  const void* data;
  long group;
  Format scale_format;
  const void* scales;
  const void* biases;
};

constexpr long kTile = 16;

inline bool is_tiled(Format f) { return f == Format::tiles4 || f == Format::tiles8; }
inline long tile_head_bytes(const Weight& w) { return 2 * kTile * (w.scale_format == Format::float32 ? 4 : 2); }
inline long tile_group_bytes(const Weight& w) {
  return tile_head_bytes(w) + kTile * w.group / (w.format == Format::tiles4 ? 2 : 1);
}

// Keys and values that attention will read soon. A product of several rows leaves memory idle, so it asks for them
// on the way, a head of a page at a time.
struct KeysAhead {
  const char *keys, *values;
  long key_bytes, value_bytes;  // of a head of a page
  const long* heads;            // page * kv_heads + head
  long count;
  long* next;  // the first that nobody has asked for: keys and values count for one each; shared by threads
};

// A rectangle of y[M, N] = x[M, K] @ w[N, K]^T to compute; y has ld columns.
struct MatmulTile {
  const float* x;
  float* y;
  long ld;
  long row_begin, row_end;
  long col_begin, col_end;
  const KeysAhead* ahead = nullptr;  // for tiled weights
};

// A rectangle of y[M, K] = x[M, N] @ w[N, K] to compute: at most kMaxColumnRows rows, kColumns columns from a multiple
// of these on. A row of x and one of y are x_ld and y_ld values after the last; x lies as [N, M] where it is turned.
struct ColumnsTile {
  const void* x;
  Format x_format;
  bool is_turned;
  long x_ld;
  void* y;
  Format y_format;
  long y_ld;
  long row_begin, row_end;
  long col_begin, col_end;
};

// The change of a product y = x @ w^T by an adapter: y += scale * (x @ a) @ b, a [k, rank], b [rank, n]. The columns of
// b lie in panels, one behind the other, each row-major: `panel` columns, the last one what is left.
struct LowRank {
  Format format;  // of a and b: float32, float16 or bfloat16
  long k, n, rank;
  const void *a, *b;
  long panel;
  float scale;
};

struct Attention {
  const float* q;
  const void* keys;
  const void* values;
  Format format;
  const int* block_tables;
  long max_pages;
  long heads, kv_heads, page, dim, value_dim;
  float scale;
  long window;    // 0: none
  float softcap;  // 0: none
  const float* sinks;
  float* out;
};

// Some rows of one sequence and one kv head. Row i sees the positions up to first_position + i.
struct AttentionItem {
  long sequence, kv_head;
  long row_begin, num_rows;
  long first_position;
};

// Groups of x [..., K] to quantize; all outputs are indexed by the group. `biases` is null but for affine formats,
// whose scales and biases have the type of x. With an effort of 0 as mx.quantize does it; else that many ranges are
// tried for each group, and columns count by `importance` [K] where it is given.
struct Quantization {
  const void* x;
  Format x_format;
  bool is_affine;
  int bits;
  long group, groups_per_row, effort;
  const float* importance;
  uint32_t* words;
  void *scales, *biases;
};

enum class Activation { silu, gelu_tanh, gelu };

// The best tokens of a row, an equal logit with a lower id being the better: all above `least`, and of those that
// equal it the ids up to `last`.
struct Cut {
  float least;
  int last;
};

// A draw in progress: the token with the best score so far.
struct Draw {
  float top;  // the largest logit
  double temperature;
  uint32_t key[2];
  Cut cut;
  double score;
  int token;
};

constexpr long kSampleBlock = 256;  // logits that share one maximum

constexpr long kSplit = 128;  // keys, in absolute positions, that one partial result covers
constexpr long kMaxDirectRows = 4;
constexpr long kColumns = 128, kMaxColumnRows = 128;  // of a ColumnsTile

struct TrainingKernels;

// What one instruction set offers. No function throws or allocates; scratch is given by the caller.
struct Kernels {
  const char* name;
  long row_tile;    // packed rows come in multiples of this
  long panel_cols;  // columns of a panel
  long block_rows;  // up to these, blocks of kMaxDirectRows are no slower than panels that few rows share
  // Few rows (at most kMaxDirectRows): weights are dequantized in registers.
  void (*matmul_direct)(const Weight&, const MatmulTile&);
  // Many rows: x is packed once, then each panel of weights is dequantized once for all rows of the tile.
  std::size_t (*packed_floats)(long rows, long k);
  void (*pack)(const float* x, long rows, long k, float* packed);
  std::size_t (*panel_floats)(long k);
  void (*matmul_panel)(const Weight&, const MatmulTile&, const float* packed, float* panel);

  // Tiled weights; all null where the instruction set has no integer dot product. x becomes integers of `digits`
  // (1 to 3) digits once, K being a multiple of 32; columns of a tile begin and end with a tile.
  std::size_t (*digit_bytes)(long rows, long k, long digits);
  void (*to_digits)(const float* x, long rows, long k, long digits, void* to);
  void (*tile_matmul)(const Weight&, const void* x, long digits, const MatmulTile&);

  // x @ w of any weight; `scratch` has columns_floats.
  std::size_t (*columns_floats)();
  void (*matmul_columns)(const Weight&, const ColumnsTile&, float* scratch);

  // Values of a float format to float32, and back, rounded to the nearest.
  void (*widen)(Format format, const void* from, long n, float* to);
  void (*narrow)(Format format, const float* from, long n, void* to);

  // y [rows, rank] = columns begin to end - 1 of x [rows, k] times these rows of `a`; rows of y are `ld` apart.
  void (*low_rank_inner)(const LowRank&, const float* x, long rows, long begin, long end, float* y, long ld);
  // Changes a rectangle of y; `inner` is x @ a of its rows, inner_ld apart. The tile's x is not read.
  void (*low_rank_change)(const LowRank&, const float* inner, long inner_ld, const MatmulTile&);

  // Row n of a weight, dequantized.
  void (*read_row)(const Weight&, long n, float* to);

  // The first index of the largest value; -1 where a value is NaN.
  long (*argmax)(const float* x, long n);
  // The largest of each block of kSampleBlock values; false where a value is NaN.
  bool (*block_maxima)(const float* x, long n, float* maxima);
  // The sum of e ** (x[i] - top), for x[i] <= top; the terms as well, where `weights` is given.
  double (*weigh)(const float* x, long n, float top, float* weights);
  // Tokens first, first + 1, ... with the logits x, as far as they are in the cut, in order; returns how many.
  // Writes up to 15 items more, as `weigh` does.
  long (*collect)(const float* x, long first, long n, const Cut& cut, float* values, int* ids);
  // Takes the same tokens into a draw.
  void (*draw)(const float* x, long first, long n, Draw& draw);
  void (*rms_norm)(const float* x, const void* weight, Format format, float eps, long rows, long k, float* y);
  // gate[i] = f(gate[i]) * up[i]
  void (*activate)(Activation f, float* gate, const float* up, long n);
  // y[i] += x[i] * factor
  void (*add_scaled)(float* y, const float* x, float factor, long n);
  // Rotates the first 2 * half values of each head in place; angles are half cosines, then half sines.
  // Pairs are (i, i + half), or (2 i, 2 i + 1) where is_interleaved; values are scaled by `factor` before.
  void (*rotate)(float* x, long heads, long dim, const float* angles, long half, bool is_interleaved, float factor);

  // Groups begin to end - 1.
  void (*quantize)(const Quantization&, long begin, long end);

  std::size_t (*attention_scratch_floats)(const Attention&, long max_rows);
  std::size_t (*partial_floats)(const Attention&, long rows);
  // One split of an item into `partial`; all of it into the output.
  void (*attend_split)(const Attention&, const AttentionItem&, long split, float* partial, float* scratch);
  void (*attend_merge)(const Attention&, const AttentionItem&, const float* partials, float* scratch);
  void (*attend_whole)(const Attention&, const AttentionItem&, float* scratch);

  const TrainingKernels* training;
};

}  // namespace mlxserve
