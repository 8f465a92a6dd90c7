#include "launch/pretend/rank_list.h"

#include <ddp/internal/text.h>

#include "launch/texts.h"

namespace ddp::launch {
namespace {

/// Two numbers are shorter as such than as a range.
constexpr size_t kLeastOfRange = 3;

/// \return false where the text is no number and no range.
bool add_range(const std::string& text, int size, std::vector<int>& ranks) {
  const auto hyphen = text.find('-'), colon = text.find(':');
  const auto first = number_in(text.substr(0, hyphen), 0, size - 1);
  if (!first || (hyphen == std::string::npos && colon != std::string::npos)) return false;
  if (hyphen == std::string::npos) {
    ranks.push_back(*first);
    return true;
  }
  const auto last = number_in(
      text.substr(hyphen + 1, colon == std::string::npos ? colon : colon - hyphen - 1), *first,
      size - 1);
  const auto step = colon == std::string::npos ? std::optional<int>(1)
                                               : number_in(text.substr(colon + 1), 1, size);
  if (!last || !step) return false;
  for (int64_t rank = *first; rank <= *last; rank += *step) ranks.push_back(static_cast<int>(rank));
  return true;
}

/// How many ranks from `begin` on are one range.
size_t length_of_range(const std::vector<int>& ranks, size_t begin) {
  size_t end = begin + 1;
  if (end == ranks.size() || ranks[end] <= ranks[begin]) return 1;
  const int step = ranks[end] - ranks[begin];
  while (end < ranks.size() && ranks[end] - ranks[end - 1] == step) ++end;
  return end - begin;
}

}  // namespace

std::optional<std::vector<int>> parse_rank_list(const std::string& text, int size) {
  std::vector<int> ranks;
  for (const auto& part : split(text, ',')) {
    if (!add_range(part, size, ranks)) return std::nullopt;
  }
  return ranks;
}

std::string rank_list_text(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    const auto length = length_of_range(ranks, i);
    const bool is_range = length >= kLeastOfRange;
    text += str(text.empty() ? "" : ",", ranks[i]);
    if (is_range) {
      const int step = ranks[i + 1] - ranks[i];
      text += str("-", ranks[i + length - 1], step > 1 ? str(":", step) : "");
    }
    i += is_range ? length : 1;
  }
  return text;
}

std::string short_ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (const char c : rank_list_text(ranks))
    text += c == ',' ? std::string(", ") : std::string(1, c);
  return text;
}

}  // namespace ddp::launch
