#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "backends/mpi/operations/operation.h"
#include "backends/mpi/operations/transfers.h"

namespace ddp::backends::mpi {

/// Tags of a collective's messages, which differ from those of others that may be under way.
struct Tags {
  int data = 0;
  int results = 0;
};

/// One message to and from each rank, at most: every collective that neither reduces nor
/// broadcasts.
struct ExchangePlan {
  struct Sent {
    const std::byte* data;
    size_t bytes;
    int to;
  };
  struct Received {
    std::byte* data;
    size_t bytes;
    int from;
  };
  std::vector<Sent> sent;
  std::vector<Received> received;
  /// Runs once all have left and arrived: copies to the caller's tensors. Owns all of the memory.
  std::function<void()> finish;
};

OperationPtr make_exchange(ExchangePlan plan, Tags tags);

/// A broadcast from `root` down a binomial tree, in pieces.
struct BroadcastPlan {
  std::byte* data;
  size_t bytes;
  int root;
  std::function<void()> finish;
};

OperationPtr make_broadcast(BroadcastPlan plan, Tags tags);

}  // namespace ddp::backends::mpi
