// Variables of the environment, which a function gets to look up. Without LibTorch, for ddprun
// reads them, too.
#pragma once

#include <algorithm>
#include <charconv>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

namespace ddp {

/// Looks a variable up, as getenv does.
using Lookup = std::function<std::optional<std::string>(const std::string& name)>;

/// A value and where it came from, for error messages: "SLURM_PROCID", "world_size()".
struct Setting {
  std::string name;
  std::string value;
};

/// Looks a variable up. Nothing if it is not set, or empty.
inline std::optional<Setting> read_variable(const Lookup& lookup, const std::string& name) {
  auto value = lookup(name);
  if (!value || value->empty()) return std::nullopt;
  return Setting{name, std::move(*value)};
}

/// The first of them that is set; null pointers are skipped.
template <typename Names>
std::optional<Setting> first_variable(const Lookup& lookup, const Names& names) {
  for (const auto* name : names) {
    auto setting = name != nullptr ? read_variable(lookup, name) : std::nullopt;
    if (setting) return setting;
  }
  return std::nullopt;
}
inline std::optional<Setting> first_variable(
    const Lookup& lookup, std::initializer_list<const char*> names) {
  return first_variable<std::initializer_list<const char*>>(lookup, names);
}

/// The number that a value begins with, after a colon: 2 of "2", of "1:2" (a range of hosts) and of
/// "2(x3)" (SLURM's 2 on each of 3 hosts). 0: there is none.
inline int number_in(const std::string& value) {
  const auto begin = value.rfind(':') + 1;  // 0 without a colon
  int number = 0;
  const auto* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data() + begin, end, number);
  return error == std::errc() && (stop == end || *stop == '(') ? std::max(number, 0) : 0;
}

/// The beginning of a long value, for a text.
inline std::string short_text(const std::string& value) {
  constexpr size_t kMost = 200;
  return value.size() <= kMost ? value : value.substr(0, kMost) + "...";
}

}  // namespace ddp
