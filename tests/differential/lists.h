// Lists of what the ranks of a program call: of real ones, which are processes, and of pretended
// ones.
#pragma once

#include <string>
#include <vector>

#include "differential/choice.h"
#include "differential/worker.h"
#include "launch/pretend/call_list.h"

namespace ddp::differential {

/// Runs the program up to its reload on ranks that are processes, and each of its ranks once more
/// while the others do not exist. The lists of both have to be alike and in order, and a mistake
/// that is put into one of them has to be found.
///
/// Forks: this process must have no threads.
Outcome compare_lists(const Program& program);

/// One rank of a program, in a process of its own, with what a launcher sets in its environment.
///
/// \param folder  for a checkpoint.
/// \return  the text of its error; "" for none.
std::string run_as_process(const Program& program, const std::string& folder);

/// What a list has of a mistake.
struct Broken {
  std::vector<launch::CallList> lists;
  std::string what;  ///< "rank 1 leaves out all_reduce ..."; empty: there was no call to break
};

/// Puts one mistake, drawn from a number, into one rank's list: one that no order can have.
/// Each rank of the world has a list.
Broken break_one(std::vector<launch::CallList> lists, uint64_t seed);

}  // namespace ddp::differential
