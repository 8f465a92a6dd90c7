#include "metrics/json_lines.h"

#include <algorithm>

#include <ddp/internal/text.h>

namespace ddp {
namespace {

constexpr const char* kLineBegin = "{\"step\":";

std::string time_text(double time) {
  constexpr int kDecimals = 3;
  std::array<char, 400> text{};  // the largest double has 309 digits
  const auto end = std::to_chars(
      text.data(), text.data() + text.size(), time, std::chars_format::fixed, kDecimals);
  return {text.data(), end.ptr};
}

}  // namespace

std::string json_line(const MetricPoint& point) {
  return ddp::str(
      kLineBegin, point.step, ",\"time\":", time_text(point.time),
      ",\"name\":", json_text(point.name),
      ",\"value\":", number_text(point.value, {"\"NaN\"", "\"Infinity\"", "\"-Infinity\""}), "}\n");
}

LinesRepair repair_of_lines(const std::string& tail) {
  const auto end = tail.rfind('\n');
  const auto last = end == std::string::npos ? tail : tail.substr(end + 1);
  if (last.empty()) return {};
  if (last.front() == '{' && last.back() == '}') return {true, 0, true};
  const std::string begin = kLineBegin;
  const auto common = std::min(begin.size(), last.size());
  if (last.compare(0, common, begin, 0, common) == 0) return {true, last.size(), false};
  return {false, 0, false};
}

}  // namespace ddp
