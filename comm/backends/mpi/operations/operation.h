// The operations that the MPI thread carries out in steps, and how each is made.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backends/mpi/mpi_calls.h"

namespace ddp::backends::mpi {

class Channel;
class MpiWork;

/// A collective or a message that the MPI thread carries out.
class Operation {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Operation() = default;

  /// Posts messages and tests those under way. The first call begins.
  ///
  /// \return  whether the operation is over.
  /// \throws  if it has failed, with its group.
  virtual bool advance() = 0;

  /// Whether the last advance() has found something done.
  bool has_moved() const { return has_moved_; }

  std::shared_ptr<Channel> channel;
  c10::intrusive_ptr<MpiWork> work;
  Clock::time_point deadline;
  std::string title;               // for the message about a timeout
  std::optional<uint64_t> number;  // of a collective, in its group

 protected:
  bool has_moved_ = false;
};

using OperationPtr = std::unique_ptr<Operation>;

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

/// A message to one rank. MPI compares nothing, so an envelope says what it holds, and with a short
/// message its elements. Those of a long one follow with a tag of their own, once the receiver has
/// compared: so they cannot arrive in memory of another size.
///
/// \param tensor  dense and contiguous.
OperationPtr make_send(const at::Tensor& tensor, int to, int tag);

/// \param from  unset: any rank.
OperationPtr make_receive(const at::Tensor& tensor, std::optional<int> from, int tag);

/// A reduction: rank r combines all ranks' elements [begins[r], begins[r + 1]), its share.
///
/// Each element is combined in rank order, as over shared memory: the bits are the same in every
/// run, whatever the sizes are, and those of shm.
struct ReductionPlan {
  at::ScalarType dtype;
  c10d::ReduceOp op;
  /// This rank's elements.
  const std::byte* input;
  std::vector<size_t> begins;  // world size + 1
  /// Memory of this rank's share; may be its part of `input`. Null if the share is empty.
  std::byte* sums;
  /// Gets the shares of all ranks, where `input` lies; null: each rank keeps its own.
  std::byte* results;
  std::function<void()> finish;  // as ExchangePlan's
};

OperationPtr make_reduction(ReductionPlan plan, Tags tags);

/// Sums sparse tensors, in rank order, in place: each rank sends its own to all.
///
/// \param tensor  in coordinates (kSparse), with as many sparse dimensions on every rank.
OperationPtr make_sparse_reduction(const at::Tensor& tensor, Tags tags);

}  // namespace ddp::backends::mpi
