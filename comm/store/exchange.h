#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

/// Gives each rank the values of all, through the store. The first rank reads them, and writes them
/// as one: if each rank read all, the process that hosts the store would have to find the square of
/// the ranks.
///
/// \param keys  of the values, by rank; not in the store before.
/// \param rank  the caller's.
/// \param at_most  how long to wait for the other ranks.
/// \return  the values, by rank.
/// \throws c10::Error  if a rank's value is not there in time, or something else has written to the
///         store.
///
/// Collective: yes. Blocks: host. Cost: a set, a wait and a get; on the first rank a multiGet, or
/// a get for each rank if the store has no multiGet, and two sets.
std::vector<std::string> exchange(
    c10d::Store& store, const std::vector<std::string>& keys, int rank, const std::string& own,
    std::chrono::milliseconds at_most);

}  // namespace ddp
