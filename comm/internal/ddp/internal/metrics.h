// A list of metrics of all ranks, in place of the map that sum() takes.
#pragma once

#include <string>
#include <vector>

#include <ddp/process_group.h>

namespace ddp {

/// Adds up each value over the ranks of the group, in double.
///
/// \param subject  of texts: "Metrics".
/// \param names  of the values, as texts spell them; the same on every rank, in the same order. One
///        may occur more than once.
/// \return the sums, with the same bits on every rank.
/// \throws AgreedError  on every rank, with the same text, if names differ: it names the first two
///         that do, and the ranks. The group stays usable.
///
/// Collective: yes. Blocks: host. Cost: as sum() of a map, also of ranks that differ.
std::vector<double> sum_in_order(
    const char* subject, const std::vector<std::string>& names, const std::vector<double>& values,
    const ProcessGroup& group);

/// So many values fit into the first message of a call.
constexpr size_t kMetricsInOneMessage = 192;

}  // namespace ddp
