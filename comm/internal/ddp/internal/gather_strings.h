#pragma once

#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// Replaces the `wait()` of a collective.
using WaitForWork = c10::function_ref<void(c10d::Work& work)>;

/// all_gather_strings() that waits for its collectives by `wait`.
std::vector<std::string> gather_strings(
    const std::string& text, const ProcessGroup& group, WaitForWork wait);

/// all_gather_strings() that reports `where` as its WaitPoint.
///
/// \param monitor  of the group. Null: the one that this library made the group with, if it did.
std::vector<std::string> gather_strings(
    const std::string& text, const ProcessGroup& group, const std::string& where,
    GroupMonitor* monitor = nullptr);

/// Makes an error's text of the ranks' texts; "" for no error. A pure function, the same on all
/// ranks.
using ProblemOfRanks = c10::function_ref<std::string(const std::vector<std::string>& by_rank)>;

/// Gathers one text of each rank, and throws on every rank if they show a problem.
///
/// \param text  of this rank: its problem, or what the ranks compare.
/// \param where, monitor  as of gather_strings().
/// \return  the ranks' texts, by rank.
/// \throws AgreedError  with the text of `make_problem`, the same on every rank.
///
/// Collective: yes. Blocks: host.
std::vector<std::string> agree(
    const std::string& text, const ProcessGroup& group, const std::string& where,
    ProblemOfRanks make_problem, GroupMonitor* monitor = nullptr);

/// Returns the first rank whose text differs from rank 0's; 0 for none.
size_t first_different_rank(const std::vector<std::string>& by_rank);

}  // namespace ddp
