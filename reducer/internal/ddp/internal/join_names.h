#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ddp {

/// The most names that a text lists.
constexpr size_t kMostNames = 10;

/// "a, b, c", and "and k more" beyond kMostNames.
std::string join_names(const std::vector<std::string>& names);

}  // namespace ddp
