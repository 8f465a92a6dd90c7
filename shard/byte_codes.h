// The numbers that bytes stand for, before they are multiplied by a scale. Loops over these
// functions compile to vector instructions, without a table and without a branch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace ddp {

inline uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

/// The integers from `least` to `most`, which include 0; `zero` is the byte of 0.
struct IntegerCode {
  float rounded(float value) const {
    // Rounds to the nearest, half to even, below 2^22; std::nearbyint is a call.
    constexpr float kRound = 12582912;
    return (std::min(std::max(value, least), most) + kRound) - kRound;
  }
  uint8_t byte_of(float number) const {
    return static_cast<uint8_t>(static_cast<int32_t>(number + zero));
  }
  float number_of(uint8_t byte) const { return static_cast<float>(byte) - zero; }

  float zero;
  float least = 0;
  float most = 0;
};

/// Floats of 8 bits: a sign, an exponent, `kMantissa` bits, as c10::Float8_e4m3fn and
/// c10::Float8_e5m2. No byte of infinity or NaN comes: `kLargest` bounds the values.
template <int kMantissa, int kBias, int kLargest>
struct FloatCode {
  static constexpr auto kMost = static_cast<float>(kLargest);

  /// To the nearest, half to even. The sign stays, also that of 0.
  float rounded(float value) const {
    const uint32_t sign = bits_of(value) & 0x80000000U;
    const auto most = static_cast<int32_t>(bits_of(kMost));
    auto bits = static_cast<int32_t>(bits_of(value) & 0x7fffffffU);
    bits = either(bits < most, bits, most);
    const float magnitude = float_of(static_cast<uint32_t>(bits));
    // This has the last of the bits that stay as its own last bit: 2^23 of its units.
    const int32_t exponent = either(bits < kLeastNormal, kLeastNormal, bits & 0x7f800000);
    const float round = float_of(static_cast<uint32_t>(exponent + (kFewer << 23)));
    return float_of(bits_of((magnitude + round) - round) | sign);
  }
  uint8_t byte_of(float number) const {
    const auto magnitude = static_cast<int32_t>(bits_of(number) & 0x7fffffffU);
    const int32_t normal = (magnitude >> kFewer) - (kRebias << kMantissa);
    // In a sum with the least normal number, a subnormal one has its bits where that has them.
    const float sum =
        float_of(static_cast<uint32_t>(magnitude)) + float_of(static_cast<uint32_t>(kLeastNormal));
    const int32_t subnormal =
        static_cast<int32_t>(bits_of(sum) >> kFewer) - ((kRebias + 1) << kMantissa);
    const int32_t code = either(magnitude < kLeastNormal, subnormal, normal);
    return static_cast<uint8_t>(((bits_of(number) >> 24U) & 0x80U) | static_cast<uint32_t>(code));
  }
  float number_of(uint8_t byte) const {
    const int32_t code = byte & 0x7f;
    const int32_t normal = (code << kFewer) + (kRebias << 23);
    const auto subnormal = static_cast<int32_t>(bits_of(static_cast<float>(code) / kUnits));
    const int32_t magnitude = either(code < (1 << kMantissa), subnormal, normal);
    return float_of(((byte & 0x80U) << 24U) | static_cast<uint32_t>(magnitude));
  }

 private:
  // GCC 12 makes branches of ?: with floats and of std::max, which keep loops from vectors.
  static int32_t either(bool is_first, int32_t first, int32_t second) {
    const int32_t mask = -static_cast<int32_t>(is_first);
    return (first & mask) | (second & ~mask);
  }

  static constexpr int32_t kFewer = 23 - kMantissa;             // bits than float's mantissa
  static constexpr int32_t kRebias = 127 - kBias;               // of float's exponent
  static constexpr int32_t kLeastNormal = (kRebias + 1) << 23;  // as a float's bits
  static constexpr auto kUnits = static_cast<float>(1 << (kBias - 1 + kMantissa));  // in 1
};

using E4m3Code = FloatCode</*kMantissa=*/3, /*kBias=*/7, /*kLargest=*/448>;
using E5m2Code = FloatCode</*kMantissa=*/2, /*kBias=*/15, /*kLargest=*/57344>;

}  // namespace ddp
