#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "arena.h"
#include "conveyor.h"
#include "exchange.h"
#include "in_arena.h"

namespace ddp::backends::shm {

/// The ranks of one host. The first of them leads.
struct Host {
  std::shared_ptr<Arena> arena;      // this rank's
  std::shared_ptr<Exchange> gather;  // of the host's ranks
  std::shared_ptr<Exchange> spread;  // of the same
  int local_rank = 0;
  int local_size = 1;
  std::vector<int> leaders = {};  // of all hosts, in their order

  bool is_led_by_this_rank() const { return local_rank == 0; }
};

/// All-reduces CPU tensors of several hosts: the ranks of a host add theirs up in memory that they
/// share, the hosts' leaders add up the sums over Gloo, and each host copies the result from its
/// leader. So the network carries each element once a host, and not once a rank. A barrier goes the
/// same way, behind what was begun before it. All else is Gloo's.
///
/// Sums are taken in rank order within a host, and then in the order of the hosts' first ranks.
/// What fails anywhere fails the group: also a call that does not match the others', which on one
/// host alone would not.
class HostsBackend : public InArena {
 public:
  /// \param leaders  a backend of all hosts' leaders, on those alone; its ranks are the hosts.
  HostsBackend(
      int rank, int world_size, Host host, c10::intrusive_ptr<c10d::Backend> leaders,
      c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout);
  ~HostsBackend() override;

  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override;
  void shutdown() override;
  void abort() override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  struct Passage;
  using PassagePtr = std::shared_ptr<Passage>;

  WorkPtr pass(Kind kind, const Tensor& tensor, const c10d::AllreduceOptions& options);

  /// What goes on behind the calls, and what callbacks hold; outlives the backend in those.
  class Road;

  std::shared_ptr<Road> road_;
  std::mutex latest_mutex_;
  c10::weak_intrusive_ptr<c10d::Work> latest_;  // gone when it is over and nobody asks for it
};

}  // namespace ddp::backends::shm
