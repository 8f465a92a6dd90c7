// Lists of ranks as users and files of calls write them: "0,7,512", "0-1023", "3-1019:8".
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace ddp::launch {

/// Reads numbers and ranges, the end of a range included, with a step where it has one.
///
/// \return the numbers in the order of the text; nothing where it is no such list, or has a number
///         that is not below `size`.
std::optional<std::vector<int>> parse_rank_list(const std::string& text, int size);

/// The shortest text that parse_rank_list() reads as these ranks.
std::string rank_list_text(const std::vector<int>& ranks);

/// "rank 7", "ranks 0, 7", "ranks 0-1023".
std::string short_ranks_text(const std::vector<int>& ranks);

}  // namespace ddp::launch
