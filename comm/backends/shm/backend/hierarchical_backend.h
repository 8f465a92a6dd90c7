#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>

#include <ddp/internal/inter_host_timer.h>

#include "fallback_backend.h"
#include "hierarchical_pipeline.h"

namespace ddp::backends::shm {

/// All-reduces CPU tensors of several hosts: the ranks of a host reduce theirs in memory that they
/// share, the hosts' leaders reduce the results over Gloo, and the ranks of a host copy the result
/// from their leader. So the network carries each element once per host, not once per rank. A
/// barrier takes the same way, after the operations that started before it. Gloo carries the rest.
///
/// Elements are summed in rank order within a host, and then in the order of the hosts' first
/// ranks. Any failure aborts the group, including a call that does not match the other ranks'
/// calls, which a group on one host survives.
class HierarchicalBackend : public FallbackBackend, public InterHostTimer {
 public:
  /// \param leaders  a backend of all hosts' leaders, on those alone; its ranks are the hosts.
  HierarchicalBackend(
      int rank, int world_size, std::shared_ptr<HostMemory> memory, Host host,
      c10::intrusive_ptr<c10d::Backend> leaders, c10::intrusive_ptr<c10d::Backend> gloo,
      std::chrono::milliseconds timeout);
  ~HierarchicalBackend() override;

  /// Each tensor is an all-reduce of its own between hosts; from this size on its latency is small.
  size_t least_in_place() const override { return size_t{1} << 20; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override;
  void shutdown() override;
  void abort() override;
  std::optional<double> inter_host_ms() const override { return pipeline_->inter_host_ms(); }

 private:
  WorkPtr run(Collective c) override;
  WorkPtr run_barrier(const Collective& c);
  at::Tensor shared_or_abort(Kind kind, const Tensor& tensor);
  WorkPtr start(Kind kind, const Tensor& tensor, const c10d::AllreduceOptions& options);

  const std::shared_ptr<HierarchicalPipeline> pipeline_;
  std::mutex latest_mutex_;
  c10::weak_intrusive_ptr<c10d::Work>
      latest_;  // expires once it is complete and its caller has dropped it
};

}  // namespace ddp::backends::shm
