// Lists of ranks as users, errors and files of calls write them: "0,7,512", "0-1023", "3-1019:8".
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ddp/internal/text.h>

namespace ddp {

/// How many ranks from `begin` on are one range.
inline size_t length_of_range(const std::vector<int>& ranks, size_t begin) {
  size_t end = begin + 1;
  if (end == ranks.size() || ranks[end] <= ranks[begin]) return 1;
  const int step = ranks[end] - ranks[begin];
  while (end < ranks.size() && ranks[end] - ranks[end - 1] == step) ++end;
  return end - begin;
}

/// The shortest list of the ranks: three or more of equal distances are a range.
inline std::string rank_list_text(const std::vector<int>& ranks) {
  constexpr size_t kLeastOfRange = 3;
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    const auto length = length_of_range(ranks, i);
    const bool is_range = length >= kLeastOfRange;
    text += ddp::str(text.empty() ? "" : ",", ranks[i]);
    if (is_range) {
      const int step = ranks[i + 1] - ranks[i];
      text += ddp::str("-", ranks[i + length - 1], step > 1 ? ddp::str(":", step) : "");
    }
    i += is_range ? length : 1;
  }
  return text;
}

}  // namespace ddp
