// Without LibTorch, as are the encoders of points.
#pragma once

#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>

namespace ddp {

/// A value that has a name, of one step of a training.
struct MetricPoint {
  std::string name;
  int64_t step = 0;
  double time = 0;  // seconds since 1970
  double value = 0;
};

/// The spellings of numbers that are not finite.
struct NonfiniteTexts {
  const char* nan;
  const char* infinity;
  const char* negative_infinity;
};

/// The shortest text from which the same number is read again. Not by a stream, which may group
/// digits, nor by std::printf, which may write a decimal comma.
inline std::string number_text(double value, const NonfiniteTexts& texts) {
  if (std::isnan(value)) return texts.nan;
  if (std::isinf(value)) return value > 0 ? texts.infinity : texts.negative_infinity;
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

}  // namespace ddp
