#include "weight.h"

#include "primitive.h"

namespace mlxserve {
namespace {

struct FloatMode {
  const char* name;
  int group_size, bits;
  Format format;
};

constexpr FloatMode kFloatModes[] = {
    {"mxfp4", 32, 4, Format::mxfp4}, {"mxfp8", 32, 8, Format::mxfp8}, {"nvfp4", 16, 4, Format::nvfp4}};

bool is_float_mode(Format f) { return f == Format::mxfp4 || f == Format::mxfp8 || f == Format::nvfp4; }

Format affine_format(const char* op, int group_size, int bits) {
  require(group_size == 32 || group_size == 64 || group_size == 128, op, ": group_size must be 32, 64 or 128, got ",
          group_size);
  switch (bits) {
    case 2: return Format::affine2;
    case 3: return Format::affine3;
    case 4: return Format::affine4;
    case 5: return Format::affine5;
    case 6: return Format::affine6;
    case 8: return Format::affine8;
  }
  require(false, op, ": bits must be 2, 3, 4, 5, 6 or 8, got ", bits);
  return Format::affine4;
}

}  // namespace

bool is_affine(Format format) { return !is_float_mode(format); }

Format quantized_format(const char* op, int group_size, int bits, const std::string& mode) {
  if (mode == "affine") return affine_format(op, group_size, bits);
  for (const FloatMode& each : kFloatModes)
    if (mode == each.name) {
      require(group_size == each.group_size && bits == each.bits, op, ": ", mode, " has group_size ", each.group_size,
              " and bits ", each.bits, ", got ", group_size, " and ", bits);
      return each.format;
    }
  require(false, op, ": mode must be affine, mxfp4, mxfp8 or nvfp4, got ", mode);
  return Format::affine4;
}

namespace {

long value_bits(Format f) {
  switch (f) {
    case Format::float32: return 32;
    case Format::float16:
    case Format::bfloat16: return 16;
    case Format::affine8:
    case Format::mxfp8: return 8;
    case Format::affine6: return 6;
    case Format::affine5: return 5;
    case Format::affine4:
    case Format::mxfp4:
    case Format::nvfp4: return 4;
    case Format::affine3: return 3;
    case Format::affine2: return 2;
    case Format::tiles4:
    case Format::tiles8:
    case Format::kv8:
    case Format::kv4: break;  // no rows of their own
  }
  return 0;
}

std::string text_of(const mx::Shape& shape) {
  std::string text;
  for (auto size : shape) text += (text.empty() ? "[" : ", ") + std::to_string(size);
  return text + "]";
}

}  // namespace

Weight quantized_shape(const char* op, const mx::array& w, const mx::array& scales,
                       const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode) {
  Weight shape{};
  shape.format = quantized_format(op, group_size, bits, mode);
  require(w.dtype() == mx::uint32 && w.ndim() >= 2, op, ": w must be uint32 [..., N, K * bits / 32]");
  long words = w.shape(-1), k = words * 32 / bits;
  require(k > 0 && k % std::max(group_size, 32) == 0, op, ": K must be a multiple of ", std::max(group_size, 32),
          ", got ", k);
  require(k / 32 * bits == words, op, ": rows of w hold no whole number of groups");
  mx::Shape groups = w.shape();
  groups.back() = static_cast<mx::ShapeElem>(k / group_size);
  shape.n = w.shape(-2), shape.k = k, shape.group = group_size;
  if (is_float_mode(shape.format)) {
    require(!biases, op, ": ", mode, " has no biases");
    require(scales.shape() == groups && scales.dtype() == mx::uint8, op, ": scales must be uint8 ", text_of(groups));
    return shape;
  }
  require(biases && scales.shape() == groups && biases->shape() == groups, op, ": scales and biases must be ",
          text_of(groups));
  shape.scale_format = format_of(scales, op, "scales");
  require(biases->dtype() == scales.dtype(), op, ": scales and biases must have one dtype");
  return shape;
}

Weight rows_of(Weight w, long begin, long count) {
  auto skip = [begin](const void*& at, long bytes) { at = static_cast<const char*>(at) + begin * bytes; };
  w.n = count;
  if (is_tiled(w.format)) {
    skip(w.data, w.k / w.group * tile_group_bytes(w) / kTile);
    return w;
  }
  skip(w.data, w.k * value_bits(w.format) / 8);
  if (!w.group) return w;
  const bool has_biases = !is_float_mode(w.format);
  const long scales = w.k / w.group * (has_biases ? value_bits(w.scale_format) / 8 : 1);
  skip(w.scales, scales);
  if (has_biases) skip(w.biases, scales);
  return w;
}

}  // namespace mlxserve
