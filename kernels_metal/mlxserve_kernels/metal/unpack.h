// Readers of quantized weights, one a format: eight values that lie in a row, and the scale of their group.
//
// A reader has
//   group          values that share a scale
//   has_bias       whether a group has a bias
//   Raw            eight packed values; `read(row, k)` takes them from a row at value k, a multiple of 8
//   scale, bias    of a group, as floats: `read_scale`, `read_bias`, from memory of any kind
//   values(...)    raw, scale and bias to eight floats
// and reads just the bytes of what it was asked for.

// 8 * Bits bits, the first value in the lowest ones.
template <int Bits>
struct Eight {
  uint low;
  uint high;

  static Eight<Bits> read(const device uchar* row, int k) {
    const device uchar* at = row + k / 8 * Bits;
    Eight<Bits> raw;
    raw.high = 0;
    if constexpr (Bits == 2) {
      raw.low = *(const device ushort*)at;
    } else if constexpr (Bits == 4) {
      raw.low = *(const device uint*)at;
    } else if constexpr (Bits == 8) {
      const uint2 both = *(const device uint2*)at;
      raw.low = both.x;
      raw.high = both.y;
    } else {
      raw.low = uint(at[0]) | uint(at[1]) << 8 | uint(at[2]) << 16;
      if constexpr (Bits > 3) raw.low |= uint(at[3]) << 24;
      if constexpr (Bits > 3) raw.high = at[4];
      if constexpr (Bits > 5) raw.high |= uint(at[5]) << 8;
    }
    return raw;
  }

  // That of another lane.
  Eight<Bits> from_lane(ushort lane) const thread {
    Eight<Bits> raw;
    raw.low = simd_shuffle(low, lane);
    raw.high = Bits > 4 ? simd_shuffle(high, lane) : 0;
    return raw;
  }

  static Eight<Bits> zero() {
    Eight<Bits> raw;
    raw.low = raw.high = 0;
    return raw;
  }

  uint at(int i) const thread {
    const int bit = i * Bits;
    if (bit >= 32) return high >> (bit - 32) & ((1u << Bits) - 1);
    if (bit + Bits <= 32) return low >> bit & ((1u << Bits) - 1);
    return (low >> bit | high << (32 - bit)) & ((1u << Bits) - 1);
  }
};

// scale * q + bias; scales and biases of type S.
template <typename S, int Group, int Bits>
struct Affine {
  typedef S Scale;
  typedef Eight<Bits> Raw;
  static constexpr constant int group = Group;
  static constexpr constant int bits = Bits;
  static constexpr constant bool has_bias = true;

  template <typename P>
  static float read_scale(P scales, int i) { return float(scales[i]); }
  template <typename P>
  static float read_bias(P biases, int i) { return float(biases[i]); }
  static void values(Raw raw, float scale, float bias, thread float* w) {
    for (int i = 0; i < 8; i++) w[i] = fma(scale, float(raw.at(i)), bias);
  }
};

// 2^(e - 127); e = 255 is infinity, as mlx has it.
inline float e8m0_to_float(uchar e) {
  return as_type<float>(e == 0 ? 0x400000u : uint(e) << 23);
}

// A sign, 4 bits of exponent, 3 of mantissa; 127 is NaN.
inline float e4m3_to_float(uint v) {
  const uint exponent = v >> 3 & 15, mantissa = v & 7;
  const float small = float(mantissa) * 0.001953125f;
  const float magnitude = exponent == 0 ? small : as_type<float>((exponent + 120) << 23 | mantissa << 20);
  const float number = (v & 127) == 127 ? NAN : magnitude;
  return (v & 128) != 0 ? -number : number;
}

// A sign, 2 bits of exponent, 1 of mantissa.
inline float e2m1_to_float(uint v) {
  const uint exponent = v >> 1 & 3, mantissa = v & 1;
  const float magnitude =
      exponent == 0 ? 0.5f * float(mantissa) : as_type<float>((exponent + 126) << 23 | mantissa << 22);
  return (v & 8) != 0 ? -magnitude : magnitude;
}

// mxfp4, mxfp8, nvfp4: small floats, one scale of 8 bits a group and no bias (OCP MX v1.0; NVFP4's scale is e4m3).
template <int Group, int Bits, bool IsE8m0>
struct SmallFloat {
  typedef uchar Scale;
  typedef Eight<Bits> Raw;
  static constexpr constant int group = Group;
  static constexpr constant int bits = Bits;
  static constexpr constant bool has_bias = false;

  template <typename P>
  static float read_scale(P scales, int i) {
    return IsE8m0 ? e8m0_to_float(scales[i]) : e4m3_to_float(scales[i]);
  }
  template <typename P>
  static float read_bias(P, int) { return 0; }
  static void values(Raw raw, float scale, float, thread float* w) {
    for (int i = 0; i < 8; i++) w[i] = (Bits == 8 ? e4m3_to_float(raw.at(i)) : e2m1_to_float(raw.at(i))) * scale;
  }
};

enum Mode { affine, mxfp4, mxfp8, nvfp4 };

template <int M, typename S, int Group, int Bits>
struct ReaderOf {
  typedef Affine<S, Group, Bits> type;
};
template <typename S, int Group, int Bits>
struct ReaderOf<mxfp4, S, Group, Bits> {
  typedef SmallFloat<32, 4, true> type;
};
template <typename S, int Group, int Bits>
struct ReaderOf<mxfp8, S, Group, Bits> {
  typedef SmallFloat<32, 8, true> type;
};
template <typename S, int Group, int Bits>
struct ReaderOf<nvfp4, S, Group, Bits> {
  typedef SmallFloat<16, 4, false> type;
};
