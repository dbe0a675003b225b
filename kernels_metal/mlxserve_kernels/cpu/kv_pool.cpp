#include "kv_pool.h"

#include <bit>
#include <cstring>
#include <limits>

namespace mlxserve {
namespace {

struct Group {
  uint8_t bytes[kKvGroup];
  float scale, bias;
};

constexpr long kLanes = 8;  // independent minima and maxima, which the compiler makes vectors of
constexpr float kRounding = 12582912.0f;  // 1.5 * 2 ** 23: adding it rounds to an even integer
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline int to_integer(float x, float least, float most) {
  x = x < least ? least : x;
  x = x > most ? most : x;
  return std::bit_cast<int>(x + kRounding) - std::bit_cast<int>(kRounding);
}

// The largest magnitude as bits, where infinity and NaN are above all numbers.
int largest_bits(const float* x) {
  int lanes[kLanes] = {};
  for (long i = 0; i < kKvGroup; i += kLanes)
    for (long l = 0; l < kLanes; ++l) {
      int bits = std::bit_cast<int>(x[i + l]) & 0x7fffffff;
      lanes[l] = bits > lanes[l] ? bits : lanes[l];
    }
  int largest = 0;
  for (int lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
}

constexpr int kInfinityBits = 0x7f800000;

// One byte of zero and a scale and bias that make the group NaN.
void break_group(Group& g) {
  std::memset(g.bytes, 0, sizeof g.bytes);
  g.scale = g.bias = kNaN;
}

// round(x / scale) with scale = max|x| / 127.
void to_8_bits(const float* x, Group& g) {
  int largest = largest_bits(x);
  if (largest >= kInfinityBits) return break_group(g);
  g.scale = std::bit_cast<float>(largest) / 127.0f;
  float divisor = g.scale == 0 ? 1.0f : g.scale;
  for (long i = 0; i < kKvGroup; ++i) g.bytes[i] = uint8_t(to_integer(x[i] / divisor, -127, 127));
}

// round((x - bias) / scale) with bias = min(x), scale = (max(x) - min(x)) / 15.
void to_4_bits(const float* x, Group& g) {
  if (largest_bits(x) >= kInfinityBits) return break_group(g);
  float low[kLanes], high[kLanes];
  for (long l = 0; l < kLanes; ++l) low[l] = high[l] = x[l];
  for (long i = kLanes; i < kKvGroup; i += kLanes)
    for (long l = 0; l < kLanes; ++l) {
      low[l] = x[i + l] < low[l] ? x[i + l] : low[l];
      high[l] = x[i + l] > high[l] ? x[i + l] : high[l];
    }
  for (long l = 1; l < kLanes; ++l) {
    low[0] = low[l] < low[0] ? low[l] : low[0];
    high[0] = high[l] > high[0] ? high[l] : high[0];
  }
  float span = high[0] - low[0];
  if (std::bit_cast<int>(span) >= kInfinityBits) return break_group(g);
  g.bias = low[0], g.scale = span / 15.0f;
  float divisor = g.scale == 0 ? 1.0f : g.scale;
  int q[kKvGroup];
  for (long i = 0; i < kKvGroup; ++i) q[i] = to_integer((x[i] - g.bias) / divisor, 0, 15);
  for (long i = 0; i < kKvGroup / 2; ++i) g.bytes[i] = uint8_t(q[i] | q[i + kKvGroup / 2] << 4);
}

void require_units(const char* op, long page, long key_dim, long value_dim) {
  for (long dim : {key_dim, value_dim})
    require(dim > 0 && dim % kKvGroup == 0, op, ": quantized pools need a D that is a multiple of ", kKvGroup, ", got ", dim);
  require(page > 0 && page % kKvPageUnit == 0, op, ": quantized pools need a page size that is a multiple of ",
          kKvPageUnit, ", got ", page);
}

KvPools quantized_pools(const char* op, const mx::array& k_pool, const mx::array& v_pool, int bits, long key_dim,
                        long value_dim) {
  require(bits == 8 || bits == 4, op, ": kv_bits must be 8 or 4, got ", bits);
  Format format = bits == 8 ? Format::kv8 : Format::kv4;
  require(k_pool.dtype() == mx::uint8 && v_pool.dtype() == mx::uint8 && k_pool.ndim() == 3 && v_pool.ndim() == 3, op,
          ": with kv_bits pools must be uint8 [pages, heads, bytes]");
  for (auto [name, axis] : {std::pair{"pages", 0}, {"heads", 1}})
    require(k_pool.shape(axis) == v_pool.shape(axis), op, ": pools differ in ", name, ": ", k_pool.shape(axis), " and ",
            v_pool.shape(axis));
  // Rounded down: D is checked before the sizes, so that a wrong D is what an error names.
  long key_units = std::max(key_dim / kKvGroup, 1L), unit_bytes = kv_row_bytes(format, kKvGroup);
  long page = k_pool.shape(2) / (key_units * unit_bytes);
  long in_values = page ? v_pool.shape(2) / (page * unit_bytes) * kKvGroup : 0;
  require_units(op, page, key_dim, value_dim ? value_dim : in_values);
  if (!value_dim) value_dim = in_values;
  for (auto [name, pool, dim] : {std::tuple{"k_pool", &k_pool, key_dim}, {"v_pool", &v_pool, value_dim}})
    require(pool->shape(2) == page * kv_row_bytes(format, dim), op, ": ", name, " has ", pool->shape(2),
            " bytes a head, ", page, " rows of D ", dim, " in ", bits, " bits are ", page * kv_row_bytes(format, dim));
  long pages = k_pool.shape(0), heads = k_pool.shape(1);
  return {{nullptr, format, pages, heads, page, key_dim, true}, {nullptr, format, pages, heads, page, value_dim, false}};
}

}  // namespace

void KvPool::write_quantized(long slot, const float* from) const {
  const bool is_8 = format == Format::kv8;
  const long groups = dim / kKvGroup, integers = kv_row_integers(format, dim), group_bytes = integers / groups;
  const long row = slot % page;
  Group g;
  for (long head = 0; head < heads; ++head) {
    uint8_t* block = reinterpret_cast<uint8_t*>(data) + (slot / page * heads + head) * head_bytes();
    float* scales = reinterpret_cast<float*>(block + page * integers);
    // Of item i of a row of `count`.
    auto place = [&](long i, long count) { return is_transposed ? i * page + row : row * count + i; };
    for (long group = 0; group < groups; ++group, from += kKvGroup) {
      is_8 ? to_8_bits(from, g) : to_4_bits(from, g);
      for (long i = 0; i < group_bytes; ++i) block[place(group * group_bytes + i, integers)] = g.bytes[i];
      scales[place(group, groups)] = g.scale;
      if (!is_8) scales[page * groups + place(group, groups)] = g.bias;
    }
  }
}

KvPools kv_pools(const char* op, const mx::array& k_pool, const mx::array& v_pool, int kv_bits, long key_dim,
                 long value_dim) {
  if (kv_bits) return quantized_pools(op, k_pool, v_pool, kv_bits, key_dim, value_dim);
  Format format = format_of(k_pool, op, "k_pool");
  require(v_pool.dtype() == k_pool.dtype(), op, ": pools must have one dtype");
  require(k_pool.ndim() == 4 && v_pool.ndim() == 4, op,
          ": k_pool must be [pages, heads, D, page_size], v_pool [pages, heads, page_size, D]");
  for (auto [name, of_keys, of_values] : {std::tuple{"pages", k_pool.shape(0), v_pool.shape(0)},
                                          {"heads", k_pool.shape(1), v_pool.shape(1)},
                                          {"page_size", k_pool.shape(3), v_pool.shape(2)}})
    require(of_keys == of_values, op, ": pools differ in ", name, ": ", of_keys, " and ", of_values);
  long pages = k_pool.shape(0), heads = k_pool.shape(1), page = k_pool.shape(3);
  return {{nullptr, format, pages, heads, page, k_pool.shape(2), true},
          {nullptr, format, pages, heads, page, v_pool.shape(3), false}};
}

}  // namespace mlxserve
