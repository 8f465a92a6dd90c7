#include "launch/pretend/rank_list.h"

#include <ddp/internal/rank_list.h>

#include "launch/texts.h"

namespace ddp::launch {
namespace {

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

}  // namespace

std::optional<std::vector<int>> parse_rank_list(const std::string& text, int size) {
  std::vector<int> ranks;
  for (const auto& part : split(text, ',')) {
    if (!add_range(part, size, ranks)) return std::nullopt;
  }
  return ranks;
}

std::string short_ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (const char c : rank_list_text(ranks))
    text += c == ',' ? std::string(", ") : std::string(1, c);
  return text;
}

}  // namespace ddp::launch
