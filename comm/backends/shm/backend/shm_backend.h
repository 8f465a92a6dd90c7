#pragma once

#include <exception>
#include <memory>
#include <optional>

#include <c10/util/FunctionRef.h>
#include <ddp/internal/inter_host_timer.h>

#include "../memory/arena.h"
#include "../progress/progress_engine.h"
#include "fallback_backend.h"

namespace ddp::backends::shm {

/// Collectives and messages of CPU tensors through memory that the ranks of one host map together.
/// Gloo carries the rest: lists of several tensors, sparse tensors and the reductions of other
/// dtypes.
///
/// Each element is summed in rank order, so the result does not depend on sizes, timing or the run.
/// A tensor from `allocateTensor` is reduced in place. Any other tensor is copied in and out,
/// except for the share that this rank itself sums.
///
/// A call that this rank cannot announce (the arena is full, say) aborts the group, because the
/// other ranks wait for the call. They get the reason at once.
class ShmBackend : public FallbackBackend, public InterHostTimer {
 public:
  ShmBackend(
      int rank, int world_size, std::shared_ptr<HostMemory> memory,
      std::shared_ptr<ProgressEngine> engine, std::shared_ptr<GlooCarrier> gloo);
  ~ShmBackend() override;

  /// Measured with 2 and 4 ranks: for 8 KiB, reducing in place is as fast as copying.
  size_t least_in_place() const override { return size_t{16} << 10; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override;
  void shutdown() override;
  void abort() override;
  std::optional<double> inter_host_ms() const override { return 0; }

  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  WorkPtr run(Collective c) override;
  void refused(Kind kind, const std::exception& error) override;
  WorkPtr run_in_memory(const Collective& c);
  WorkPtr all_reduce(const Collective& c);
  WorkPtr broadcast_from_root(const Collective& c);
  WorkPtr reduce_to_root(const Collective& c);
  WorkPtr gather_all(const Collective& c);
  WorkPtr gather_to_root(const Collective& c);
  WorkPtr scatter_from_root(const Collective& c);
  WorkPtr reduce_parts(const Collective& c);
  WorkPtr exchange(const Collective& c);
  WorkPtr run_barrier(const Collective& c);
  /// Has Gloo carry the collective.
  WorkPtr fall_back(Collective c);
  void check_peer(const char* call, int rank) const;
  WorkPtr abort_on_error(const char* name, c10::function_ref<WorkPtr()> start_collective);
  WorkPtr start(Call call, const Collective& c, const char* title);
  WorkPtr start(Call call, c10d::OpType type, const char* title, Tensors outputs);

  const std::shared_ptr<ProgressEngine> engine_;
};

}  // namespace ddp::backends::shm
