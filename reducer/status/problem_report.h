#pragma once

#include <string>
#include <vector>

#include <ddp/internal/gather_strings.h>
#include <ddp/process_group.h>

namespace ddp {

/// A problem that one rank met in a backward pass, for the error that every rank throws.
struct Problem {
  std::string what;                          // without ranks and parameters
  std::string remedy;                        // a sentence
  std::vector<std::string> parameters = {};  // that have the problem; none: the whole pass has it
  std::string why = "";                      // the cause for these parameters
};

/// Adds `problem` to `problems`: merges it into one that differs only in its parameters, if there
/// is one. Drops parameters that `problems` name already: one cause for each is enough.
void add_problem(std::vector<Problem>& problems, Problem problem);

/// The most problems that an error's text lists.
constexpr size_t kMostProblems = 10;

/// "<what> for 2 of 3 parameters (a, b: <why>)"
///
/// \param all  the number of all parameters.
std::string describe_problem(const Problem& problem, size_t all);

/// The error text for problems, without communication: one line per distinct problem, with the
/// ranks that met it.
///
/// \param by_rank  each rank's problems; index = rank.
/// \param all  the number of all parameters.
std::string describe_problems(const std::vector<std::vector<Problem>>& by_rank, size_t all);

/// The error text for the problems of all ranks, the same on every rank.
///
/// Collective: yes, every rank calls it, also one without problems. Blocks: host.
std::string gather_problems(
    const std::vector<Problem>& mine, size_t all, const ProcessGroup& group, WaitForWork wait);

}  // namespace ddp
