#pragma once

#include <iomanip>
#include <string>

#include <ddp/internal/text.h>

namespace ddp::plan {

/// Writes a number with three digits or more, without an exponent.
inline std::string short_number(double value) {
  OutputText text;
  if (value >= 1000) {
    text << std::fixed << std::setprecision(0) << value;
  } else {
    text << std::setprecision(3) << value;
  }
  return text.str();
}

inline std::string bytes_text(double bytes) { return short_number(bytes / 1e9) + " GB"; }

inline std::string seconds_text(double seconds) {
  if (seconds >= 1) return short_number(seconds) + " s";
  if (seconds >= 1e-3) return short_number(seconds * 1e3) + " ms";
  return short_number(seconds * 1e6) + " us";
}

}  // namespace ddp::plan
