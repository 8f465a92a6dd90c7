#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <ddp/internal/c10d_names.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backends/mpi/channel.h"
#include "backends/mpi/mpi_thread.h"
#include "backends/mpi/operations/exchange.h"
#include "calls/collective_call.h"

namespace ddp::backends::mpi {

/// Collectives and messages of CPU tensors over MPI, which moves bytes. The library adds: with the
/// dtypes, the order and the bits of shared memory.
///
/// Thread safety: all members. Collectives may be started side by side; each group has
/// communicators of its own.
class MpiBackend : public c10d::Backend {
 public:
  using Tensor = at::Tensor;
  using Tensors = std::vector<Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  MpiBackend(std::shared_ptr<Channel> channel, int most_tag, std::chrono::milliseconds timeout);
  ~MpiBackend() override;

  const std::string getBackendName() const override { return "mpi"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return started_; }
  void shutdown() override {}
  void abort() override { channel_->fail(kAborted); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override;
  WorkPtr allgather(TensorLists& to, Tensors& from, const c10d::AllgatherOptions& o) override;
  WorkPtr DDP_ALL_GATHER_SINGLE(Tensor& to, Tensor& from, const c10d::AllgatherOptions& o) override;
  WorkPtr allgather_coalesced(
      TensorLists& to, Tensors& from, const c10d::AllgatherOptions& o) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::AllgatherOptions& o) override;
  WorkPtr gather(TensorLists& to, Tensors& from, const c10d::GatherOptions& o) override;
  WorkPtr scatter(Tensors& to, TensorLists& from, const c10d::ScatterOptions& o) override;
  WorkPtr reduce_scatter(
      Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& o) override;
  WorkPtr DDP_REDUCE_SCATTER_SINGLE(
      Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& o) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& o) override;
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& o) override;
  WorkPtr DDP_ALL_TO_ALL_SINGLE(
      Tensor& to, Tensor& from, std::vector<int64_t>& to_splits, std::vector<int64_t>& from_splits,
      const c10d::AllToAllOptions& o) override;
  WorkPtr barrier(const c10d::BarrierOptions& o) override;
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  /// How a collective is announced.
  struct Call {
    CollectiveCall described;
    c10d::OpType type;
    const char* title;
    Tensors outputs;
    std::chrono::milliseconds timeout;
  };
  WorkPtr start(const Call& call, c10::function_ref<OperationPtr(Tags)> make);
  WorkPtr start(
      OperationPtr operation, c10d::OpType type, const char* title, Tensors outputs,
      std::chrono::milliseconds timeout);
  WorkPtr reduce_all(
      const Tensor& tensor, const c10d::ReduceOp& op, const CollectiveCall& described,
      std::chrono::milliseconds timeout);
  WorkPtr reduce_parts(
      const Tensor& to, const Tensor& from, const CollectiveCall& described,
      const c10d::ReduceScatterOptions& o);
  /// Sends from[r] to rank r, and receives to[r] from it; either list may be empty, or have
  /// undefined tensors for ranks without a message.
  WorkPtr exchange(const Call& call, const Tensors& to, const Tensors& from);
  Tags tags_of(const CollectiveCall& call, uint64_t number) const;
  void check_message_of(
      const char* call, const Tensors& tensors, std::optional<int> peer, int tag) const;

  const std::shared_ptr<Channel> channel_;
  const int most_tag_;
  const c10::intrusive_ptr<Options> options_;
  std::mutex start_mutex_;  // collectives start in the order of their numbers
  std::atomic<uint64_t> started_{0};
};

}  // namespace ddp::backends::mpi
