#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ddp {

/// The most names that a text lists.
constexpr size_t kMostNames = 10;

/// "a, b, c", and "and k more" beyond kMostNames.
inline std::string join_names(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kMostNames; ++i) {
    if (i > 0) text += ", ";
    text += names[i];
  }
  if (names.size() > kMostNames) {
    text += " and " + std::to_string(names.size() - kMostNames) + " more";
  }
  return text;
}

}  // namespace ddp
