#pragma once

#include <string>
#include <vector>

#include <ddp/process_group.h>

namespace ddp {

/// Gathers one string of every rank, of any length each: names, error texts, descriptions.
///
/// \return world-size strings, by rank; the same on all ranks.
/// \throws c10::Error  of the group, when a rank does not take part within the group's timeout.
///
/// Collective: yes. Blocks: host.
/// Cost: two all-gathers; the second sends every rank the longest string of all, world-size times.
std::vector<std::string> all_gather_strings(const std::string& text, const GroupArg& group = {});

}  // namespace ddp
