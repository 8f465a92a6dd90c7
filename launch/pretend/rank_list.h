// Reads the lists that rank_list_text() of <ddp/internal/rank_list.h> writes.
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

/// "rank 7", "ranks 0, 7", "ranks 0-1023".
std::string short_ranks_text(const std::vector<int>& ranks);

}  // namespace ddp::launch
