#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pipeline/schedule.h"

namespace ddp {

/// A message of a batch, as its rank sees it.
struct BatchedMessage {
  bool sends = false;
  int64_t peer = 0;
  size_t step = 0;  ///< Of the rank's list: the action that made it, or that needs it.
};

/// Messages of a rank that start together, by one call.
struct PipelineBatch {
  /// The step before whose action it starts; the length of the list: after all of them.
  size_t before = 0;
  std::vector<BatchedMessage> messages;
};

/// The messages of a rank in the order in which they start where a rank has one stream for all, as
/// the one communicator of a group of NCCL's is. There a batch waits for the one before it, and
/// ends with its last message, which the other rank has to have started, too.
///
/// A clock runs the lists of all ranks, with forwards of one unit, backwards of two, and messages
/// that take no time. The messages that are sent at a time make one batch on each rank. A batch
/// starts after the actions that have ended by then, so before the action that the rank is in:
/// messages arrive while it computes. No rank waits for ever, for any real times: what a batch at a
/// time needs, on any rank, are computations that have ended by then and batches of earlier times.
/// Messages of a batch are in the order of their senders, so the same holds where a stream moves
/// the messages of a batch one after the other.
///
/// \param lists  by rank; with or without backwards.
///
/// Cost: O(ranks * chunks * microbatches).
std::vector<PipelineBatch> pipeline_batches(
    const PipelineShape&, const std::vector<std::vector<PipelineStep>>& lists, int64_t rank);

}  // namespace ddp
