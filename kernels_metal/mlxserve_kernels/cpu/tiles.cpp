// Affine weights in tiles (see kernels.h), and the setting of how exact their products are.
#include <atomic>
#include <cstring>

#include "floats.h"
#include "isa.h"
#include "mlx/ops.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"
#include "product.h"
#include "tiles_view.h"
#include "weight.h"

namespace mlxserve {
namespace {

std::atomic<long> digits_in_use{3};

// Calls move(offset in the tiles, row, first column) for each run of 4 columns of one row.
template <class Move>
void each_four(const Weight& w, Move&& move) {
  const long groups = w.k / w.group, bytes = tile_group_bytes(w), head = tile_head_bytes(w);
  parallel_for(w.n / kTile, [&](long tile) {
    for (long group = 0; group < groups; ++group)
      for (long lane = 0; lane < kTile; ++lane)
        for (long k = 0; k < w.group; k += 4) {
          long at = w.format == Format::tiles8 ? (k / 4 * kTile + lane) * 4 : (k / 8 * kTile + lane) * 4;
          move((tile * groups + group) * bytes + head + at, tile * kTile + lane, group * w.group + k);
        }
  });
}

// Calls move(offset in the tiles, index in the scales) for each scale; its bias is kTile scales behind.
template <class Move>
void each_scale(const Weight& w, long size, Move&& move) {
  const long groups = w.k / w.group, bytes = tile_group_bytes(w);
  for (long row = 0; row < w.n; ++row)
    for (long group = 0; group < groups; ++group)
      move((row / kTile * groups + group) * bytes + row % kTile * size, (row * groups + group) * size);
}

long scale_size(const Weight& w) { return w.scale_format == Format::float32 ? 4 : 2; }

class TiledMatmul : public CpuPrimitive {
 public:
  TiledMatmul(mx::Stream stream, Weight shape) : CpuPrimitive(stream), shape_(shape) {}

  const char* name() const override { return "MlxserveTiledMatmul"; }

  // inputs: x, tiles.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array x = dense(inputs[0], encoder), tiles = dense(inputs[1], encoder);
    Weight w = shape_;
    w.data = tiles.data<char>();
    Input from = input_rows(x, w.k);
    Output to = output_rows(outputs[0], w.n);
    encoder.dispatch([w, from, to, rows = long(x.size() / w.k)] {
      in_floats(from, to, rows, [&](const float* x, float* y, long, long count) { run(w, x, y, count); });
    });
  }

  // For x, with the values that the integers stand for.
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>&) override {
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      require(argnum == 0, "tiled_matmul: there is no gradient of quantized weights");
      gradients.push_back(lazy_product({cotangents[0], primals[1]}, shape_, Product::columns, primals[0].dtype()));
    }
    return gradients;
  }

 private:
  static void run(const Weight& w, const float* x, float* y, long rows) {
    constexpr long kPartRows = 128;
    const Kernels& use = kernels();
    if (rows == 0) return;
    const long digits = num_digits();
    char* integers = reinterpret_cast<char*>(scratch(1, use.digit_bytes(rows, w.k, digits) / sizeof(float) + 1));
    const std::size_t row_bytes = use.digit_bytes(1, w.k, digits);
    auto convert = [&](long row) { use.to_digits(x + row * w.k, 1, w.k, digits, integers + row * row_bytes); };
    if (rows <= kMaxDirectRows)
      for (long row = 0; row < rows; ++row) convert(row);
    else parallel_for(rows, convert);
    // Long runs of columns read memory best, short ones share the work evenly.
    long columns = std::clamp(w.n / (16L * num_threads()) / 32 * 32, 32L, 512L);
    if (rows > kMaxDirectRows) columns = 64;
    const long parts = (rows + kPartRows - 1) / kPartRows;
    parallel_for((w.n + columns - 1) / columns * parts, [&](long task) {
      long col = task / parts * columns, row = task % parts * kPartRows;
      MatmulTile tile{nullptr, y, w.n, row, std::min(row + kPartRows, rows), col, std::min(col + columns, w.n)};
      use.tile_matmul(w, integers, digits, tile);
    });
  }

  Weight shape_;
};

Format tiles_format(const char* op, int bits) {
  require(bits == 4 || bits == 8, op, ": bits must be 4 or 8, got ", bits);
  return bits == 4 ? Format::tiles4 : Format::tiles8;
}

}  // namespace

long num_digits() { return digits_in_use.load(); }
void set_digits(int digits) { digits_in_use.store(digits); }
bool has_tiles() { return kernels().tile_matmul != nullptr; }

Weight tiles_view(const char* op, const mx::array& tiles, int group_size, int bits, mx::Dtype scale_dtype) {
  require(has_tiles(), op, ": this instruction set has no tiles");
  require(group_size == 32 || group_size == 64 || group_size == 128, op, ": group_size must be 32, 64 or 128, got ",
          group_size);
  require(tiles.dtype() == mx::uint8 && tiles.ndim() == 3, op, ": tiles must be uint8 [N / 16, groups, bytes]");
  Weight w{tiles_format(op, bits), tiles.shape(0) * kTile, long(tiles.shape(1)) * group_size, nullptr, group_size,
           format_of(scale_dtype, op, "scales"), nullptr, nullptr};
  require(tiles.shape(2) == tile_group_bytes(w), op, ": a group of a tile must have ", tile_group_bytes(w),
          " bytes, got ", tiles.shape(2));
  return w;
}

mx::array pack_tiles(const mx::array& weight, const mx::array& scales, const mx::array& biases, int group_size,
                     int bits) {
  const char* op = "pack_tiles";
  require(weight.dtype() == mx::uint32 && weight.ndim() == 2 && weight.shape(0) % kTile == 0, op,
          ": w must be uint32 [N, K * bits / 32], N a multiple of ", kTile);
  Weight w{tiles_format(op, bits), weight.shape(0), long(weight.shape(1)) * 32 / bits, nullptr, group_size,
           format_of(scales, op, "scales"), nullptr, nullptr};
  require(group_size > 0 && w.k % group_size == 0, op, ": K must be a multiple of group_size ", group_size, ", got ",
          w.k);
  mx::Shape groups{weight.shape(0), static_cast<mx::ShapeElem>(w.k / group_size)};
  require(scales.shape() == groups && biases.shape() == groups && biases.dtype() == scales.dtype(), op,
          ": scales and biases must have one dtype and be [", w.n, ", ", w.k / group_size, "]");
  mx::array from = ready(weight), from_scales = ready(scales), from_biases = ready(biases);
  mx::array tiles = placed({static_cast<mx::ShapeElem>(w.n / kTile), groups[1],
                            static_cast<mx::ShapeElem>(tile_group_bytes(w))},
                           mx::uint8);
  char* to = tiles.data<char>();
  const auto* bytes = from.data<uint8_t>();
  each_four(w, [&](long at, long row, long k) {
    if (w.format == Format::tiles8) {
      std::memcpy(to + at, bytes + row * w.k + k, 4);
      return;
    }
    const uint8_t* pairs = bytes + (row * w.k + k) / 2;
    const int shift = k / 4 % 2 * 4;
    for (int j = 0; j < 4; ++j) to[at + j] = char(to[at + j] | (pairs[j / 2] >> (j % 2 * 4) & 15) << shift);
  });
  const long size = scale_size(w);
  each_scale(w, size, [&](long at, long index) {
    std::memcpy(to + at, from_scales.data<char>() + index, size);
    std::memcpy(to + at + kTile * size, from_biases.data<char>() + index, size);
  });
  return tiles;
}

std::tuple<mx::array, mx::array, mx::array> unpack_tiles(const mx::array& packed, int group_size, int bits,
                                                         mx::Dtype scale_dtype) {
  Weight w = tiles_view("unpack_tiles", packed, group_size, bits, scale_dtype);
  mx::array tiles = ready(packed);
  const char* from = tiles.data<char>();
  auto rows = static_cast<mx::ShapeElem>(w.n), groups = static_cast<mx::ShapeElem>(w.k / w.group);
  mx::array weight = placed({rows, static_cast<mx::ShapeElem>(w.k * bits / 32)}, mx::uint32);
  mx::array scales = placed({rows, groups}, scale_dtype), biases = placed({rows, groups}, scale_dtype);
  auto* bytes = weight.data<uint8_t>();
  each_four(w, [&](long at, long row, long k) {
    if (w.format == Format::tiles8) {
      std::memcpy(bytes + row * w.k + k, from + at, 4);
      return;
    }
    uint8_t* pairs = bytes + (row * w.k + k) / 2;
    for (int j = 0; j < 4; ++j)
      pairs[j / 2] = uint8_t(pairs[j / 2] | (uint8_t(from[at + j]) >> (k / 4 % 2 * 4) & 15) << (j % 2 * 4));
  });
  const long size = scale_size(w);
  each_scale(w, size, [&](long at, long index) {
    std::memcpy(scales.data<char>() + index, from + at, size);
    std::memcpy(biases.data<char>() + index, from + at + kTile * size, size);
  });
  return {weight, scales, biases};
}

mx::array tiled_matmul(const mx::array& x, const mx::array& tiles, int group_size, int bits, mx::Dtype scale_dtype) {
  const char* op = "quantized_matmul";
  Weight w = tiles_view(op, tiles, group_size, bits, scale_dtype);
  format_of(x, op, "x");
  require(x.ndim() >= 1 && x.shape(-1) == w.k, op, ": x has ", x.ndim() ? x.shape(-1) : 0, " columns, w has ", w.k);
  return lazy_tiled({x, tiles}, w, x.dtype());
}

mx::array lazy_tiled(std::vector<mx::array> inputs, const Weight& w, mx::Dtype dtype) {
  mx::Shape out = inputs[0].shape();
  out.back() = static_cast<mx::ShapeElem>(w.n);
  return mx::array(std::move(out), dtype, std::make_shared<TiledMatmul>(cpu_stream(), w), std::move(inputs));
}

mx::array tiled_rows(const mx::array& ids, const mx::array& tiles, int group_size, int bits, mx::Dtype scale_dtype) {
  const char* op = "embed_rows";
  Weight w = tiles_view(op, tiles, group_size, bits, scale_dtype);
  require(ids.dtype() == mx::int32, op, ": ids must be int32");
  return lazy_rows({ids, tiles}, w);
}

}  // namespace mlxserve
