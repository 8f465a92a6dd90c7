#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <ddp/internal/owner_process.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../memory/arena.h"
#include "../progress/progress_engine.h"
#include "base/executor.h"
#include "shm_work.h"

namespace ddp::backends::shm {

/// An all-reduce over a backend that combines elements in the order of its ranks. In Gloo's own
/// ring the order depends on the position of an element in the tensor.
///
/// Each rank combines one share of all tensors, and then gathers the other ranks' shares. As many
/// bytes are sent as in a ring. Meanwhile a rank holds three times the tensor. There are three
/// steps, the same on all ranks: the constructor sends the shares.
class OrderedReduction {
 public:
  /// \param tensor  contiguous, on the CPU; the result is in it after finish().
  /// \param options  with an operation that can_reduce, other than AVG.
  OrderedReduction(
      c10d::Backend& backend, const at::Tensor& tensor, const c10d::AllreduceOptions& options);

  using Wait = c10::function_ref<void(c10d::Work&)>;

  /// Waits for the shares, combines them, and sends the result.
  void combine(Wait wait);
  /// Waits for the results of the other ranks.
  void finish(Wait wait);

 private:
  c10d::Backend& backend_;
  at::Tensor tensor_;
  c10d::AllreduceOptions options_;
  at::Tensor all_;    // this rank's tensor, later the result; padded to shares of one size
  at::Tensor parts_;  // the share that this rank combines, of each rank's tensor
  c10::intrusive_ptr<c10d::Work> work_;
};

/// The ranks of one host. The first of them is the leader.
struct Host {
  std::shared_ptr<Arena> arena;                     // this rank's
  std::shared_ptr<ProgressEngine> intra_reduce;     // of the host's ranks
  std::shared_ptr<ProgressEngine> intra_broadcast;  // of the same ranks
  int local_rank = 0;
  int local_size = 1;
  std::vector<int> leaders = {};  // of all hosts, in their order

  bool is_led_by_this_rank() const { return local_rank == 0; }
};

/// One all-reduce or barrier over several hosts.
struct HierarchicalOperation {
  Kind kind = Kind::Barrier;
  at::Tensor tensor;  // the caller's
  at::Tensor memory;  // in the arena; `tensor` itself where that lies there
  c10d::AllreduceOptions options;
  c10::intrusive_ptr<ShmWork> work;
  uint64_t intra_reduce_number = 0;  // in Host::intra_reduce
  std::promise<std::exception_ptr> intra_reduced;
};
using OperationPtr = std::shared_ptr<HierarchicalOperation>;

/// Takes operations through three stages: an intra-host reduction into the leader's memory, an
/// all-reduce between the leaders over Gloo, and an intra-host broadcast from the leader.
///
/// The caller starts the first stage. On a leader, one executor waits for it and starts the second;
/// another executor waits for the second and starts the third. So every stage starts in the order
/// of the calls, on every rank. The engine of the broadcast completes operations. The thread that
/// finds a failure completes the operation with it, and aborts the pipeline.
///
/// Ownership: callbacks hold the pipeline, so it may outlive its backend.
/// Thread safety: all members.
class HierarchicalPipeline : public std::enable_shared_from_this<HierarchicalPipeline> {
 public:
  /// \param leaders  a backend of all hosts' leaders, on those alone; its ranks are the hosts.
  /// \param gloo  of all ranks; the pipeline aborts it when it aborts itself.
  static std::shared_ptr<HierarchicalPipeline> make(
      int world_size, Host host, c10::intrusive_ptr<c10d::Backend> leaders,
      c10::intrusive_ptr<c10d::Backend> gloo);

  const Host& host() const { return host_; }
  void set_timeout(std::chrono::milliseconds timeout);

  /// Starts the operation. Failures complete its work.
  void start(const OperationPtr& operation);

  /// Aborts: fails all operations on this host, and thereby those on the others.
  void fail(const std::string& why);

  /// As of InterHostTimer: on a leader.
  std::optional<double> inter_host_ms() const;

  /// \throws c10::DistBackendError  after fail(), with its reason.
  void check() const;

  /// Completes the operations that can complete, and aborts if others remain. Does nothing in a
  /// process that this rank forked.
  void close();

 private:
  HierarchicalPipeline(
      int world_size, Host host, c10::intrusive_ptr<c10d::Backend> leaders,
      c10::intrusive_ptr<c10d::Backend> gloo);
  template <typename Step>
  void push(Executor& executor, const OperationPtr& operation, Step step);

  void intra_reduce(const OperationPtr& operation);
  void inter_reduce(const OperationPtr& operation);
  void wait_for_intra_reduce(HierarchicalOperation& operation) const;
  void broadcast_when_reduced(const OperationPtr& operation, OrderedReduction& reduction);
  void intra_broadcast(const OperationPtr& operation);
  void complete(const OperationPtr& operation, const std::exception_ptr& error);

  void note_between_hosts(bool begins);
  void wait_or_abort(c10d::Work& work) const;
  void between_hosts(c10::function_ref<void(OrderedReduction::Wait)> step) const;

  const OwnerProcess owner_;
  const Host host_;
  const int world_size_;
  const c10::intrusive_ptr<c10d::Backend> leaders_;
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  mutable std::mutex mutex_;
  std::string abort_reason_;  // guarded by mutex_
  int between_hosts_ = 0;     // operations; guarded by mutex_, as are the next two
  std::chrono::steady_clock::time_point between_since_;
  std::chrono::steady_clock::duration between_time_{};
  std::atomic<bool> closed_{false};
  std::atomic<int> pending_{0};  // operations
  // On leaders only.
  std::unique_ptr<Executor> broadcaster_;
  std::unique_ptr<Executor> reducer_;
};

}  // namespace ddp::backends::shm
