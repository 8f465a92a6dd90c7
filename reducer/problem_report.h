#pragma once

#include <string>
#include <vector>

#include <ddp/internal/gather_strings.h>
#include <ddp/process_group.h>

namespace ddp {

/// What one rank met in a backward pass, for the error that every rank will throw.
struct Problem {
  std::string what;                          // without ranks and parameters
  std::string remedy;                        // a sentence
  std::vector<std::string> parameters = {};  // of which it is true; none: of the whole pass
  std::string why = "";                      // it is true of them
};

/// Adds `problem` to those there are: to one that is alike in all but its parameters, if there is
/// one. A parameter that is named already has its cause, and is not named again.
void add_problem(std::vector<Problem>& problems, Problem problem);

/// How many problems an error's text lists.
constexpr size_t kMostProblems = 10;

/// "<what> for 2 of 3 parameters (a, b: <why>)"
///
/// \param all  how many parameters there are.
std::string describe_problem(const Problem& problem, size_t all);

/// The error text for problems that are nobody else's business, or that were gathered already:
/// one line per distinct problem, naming the ranks that met it.
///
/// \param by_rank  each rank's problems; index = rank.
/// \param all  how many parameters there are.
std::string describe_problems(const std::vector<std::vector<Problem>>& by_rank, size_t all);

/// The same text on every rank, of what all ranks met.
///
/// Collective: yes, every rank calls it, also one without problems. Blocks: host.
std::string gather_problems(
    const std::vector<Problem>& mine, size_t all, const ProcessGroup& group, WaitForWork wait);

}  // namespace ddp
