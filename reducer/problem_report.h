#pragma once

#include <string>
#include <vector>

#include <ddp/internal/gather_strings.h>
#include <ddp/process_group.h>

namespace ddp {

/// What one rank met in a backward pass, for the error that every rank will throw.
struct Problem {
  std::string what;    // "<subject>: ..." without rank
  std::string remedy;  // a sentence
};

/// How many names an error text lists.
constexpr size_t kMostNames = 10;

/// "a, b, c", and "and k more" beyond kMostNames.
std::string join_names(const std::vector<std::string>& names);

/// The error text for problems that are nobody else's business, or that were gathered already:
/// one line per distinct problem, naming the ranks that met it.
///
/// \param by_rank  each rank's problems; index = rank.
std::string describe_problems(const std::vector<std::vector<Problem>>& by_rank);

/// The same text on every rank, of what all ranks met.
///
/// Collective: yes, every rank calls it, also one without problems. Blocks: host.
std::string gather_problems(
    const std::vector<Problem>& mine, const ProcessGroup& group, WaitForWork wait);

}  // namespace ddp
