#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ddp/process_group.h>

namespace ddp {

/// Waits for a collective in place of its own `wait()`.
using WaitForWork = std::function<void(c10d::Work& work)>;

/// Gathers one string of every rank, of any length each: names, error texts, descriptions.
///
/// \param wait  for each of the collectives.
/// \return world-size strings, by rank; the same on all ranks.
/// \throws c10::Error  of the group, when a rank does not take part within the group's timeout.
///
/// Collective: yes. Blocks: host.
/// Cost: two all-gathers; the second sends every rank the longest string of all, world-size times.
std::vector<std::string> all_gather_strings(
    const std::string& text, const GroupArg& group = {},
    const WaitForWork& wait = [](c10d::Work& work) { work.wait(); });

}  // namespace ddp
