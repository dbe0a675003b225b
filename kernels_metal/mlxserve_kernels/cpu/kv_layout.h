// Where a quantized KV pool keeps what. The pool is uint8 [pages, heads, bytes]; the bytes of a page and head are the
// integers of its rows, then float32 scales, then, for kv4, float32 biases, one of each for kKvGroup dimensions.
//
// A row of kv8 is D signed bytes. A row of kv4 is D / 2 bytes: byte i of a group has dimension i in its low half,
// dimension i + kKvGroup / 2 in its high half. Values are [page][row], keys [row][page], the scales likewise.
#pragma once

#include "kernels.h"

namespace mlxserve {

constexpr long kKvGroup = 32;
constexpr long kKvPageUnit = 16;  // the page size is a multiple of this, so that any vector of keys lies in one page

inline constexpr bool is_quantized(Format f) { return f == Format::kv8 || f == Format::kv4; }
inline constexpr long kv_row_integers(Format f, long dim) { return f == Format::kv8 ? dim : dim / 2; }
inline constexpr long kv_row_bytes(Format f, long dim) {
  return kv_row_integers(f, dim) + dim / kKvGroup * (f == Format::kv8 ? 4 : 8);
}

}  // namespace mlxserve
