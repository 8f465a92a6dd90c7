#pragma once

#include <exception>
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/reducer.h>

#include "replicas/described_items.h"
#include "wrapper/module_state.h"

namespace ddp {

/// Describes this rank's parameters, buffers and options, in the order in which it communicates.
///
/// \param trained  the parameters whose gradients are averaged.
Description describe_model(
    const std::vector<StateTensor>& state, const std::vector<NamedParameter>& trained,
    const DistributedDataParallelOptions& options, const ProcessGroup& group);

/// How the first rank that differs from rank 0 differs, and which others do; "" where all are
/// equal. Depends on the argument alone, so all ranks get the same text.
std::string describe_difference(const std::vector<Description>& by_rank);

/// Throws on every rank, with the same text, unless all ranks describe the same.
///
/// \param subject  what is compared, in the plural, for the text of a failure.
/// \param error  why this rank cannot wrap its model; null: it can. All ranks throw it.
///
/// Collective: yes. Blocks: host.
/// Cost: two all-gathers of a few bytes; of whole descriptions only when they differ.
void check_same_on_all_ranks(
    const char* subject, const Description& mine, const std::exception_ptr& error,
    const ProcessGroup& group, GroupMonitor& monitor);

}  // namespace ddp
