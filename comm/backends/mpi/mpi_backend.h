#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>

#include <c10/util/FunctionRef.h>
#include <ddp/collective_backend.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backends/mpi/channel.h"
#include "backends/mpi/mpi_thread.h"
#include "backends/mpi/operations/operation.h"

namespace ddp::backends::mpi {

/// Collectives and messages of CPU tensors over MPI, which moves bytes. The library adds: with the
/// dtypes, the order and the bits of shared memory.
///
/// Thread safety: all members. Collectives may be started side by side; each group has
/// communicators of its own.
class MpiBackend : public Uniform<c10d::Backend> {
 public:
  using Tensor = at::Tensor;

  MpiBackend(std::shared_ptr<Channel> channel, int most_tag, std::chrono::milliseconds timeout);
  ~MpiBackend() override;

  const std::string getBackendName() const override { return "mpi"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return started_; }
  void shutdown() override {}
  void abort() override { channel_->fail(kAborted); }

  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  WorkPtr run(Collective c) override;
  WorkPtr all_reduce(const Collective& c);
  WorkPtr reduce_sparse(const Collective& c);
  WorkPtr reduce_to_root(const Collective& c);
  WorkPtr reduce_parts(const Collective& c);
  WorkPtr broadcast_from_root(const Collective& c);
  /// Sends in[r] to rank r, and receives out[r] from it; either list may have undefined tensors for
  /// ranks without a message.
  WorkPtr exchange(const Collective& c, const Tensors& in, const Tensors& out);
  WorkPtr start(const Collective& c, c10::function_ref<OperationPtr(Tags)> make);
  WorkPtr start(
      OperationPtr operation, c10d::OpType type, const char* title, Tensors outputs,
      std::chrono::milliseconds timeout);
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
