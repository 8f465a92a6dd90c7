#include "peer_monitor.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <utility>

#include <c10/core/ScalarType.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp::backends::shm {

ProcessWatch::ProcessWatch(pid_t pid) : pid_(pid) {
  if (pid == ::getpid()) return;
  process_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  DDP_CHECK(
      process_, "expected to watch process ", pid,
      " with pidfd_open, but could not: ", std::strerror(errno));
}

bool ProcessWatch::has_ended() const {
  pollfd event{process_.get(), POLLIN, 0};
  return process_ && ::poll(&event, 1, 0) == 1;
}

PeerMonitor::PeerMonitor(int rank, std::shared_ptr<ControlBlock> control, std::vector<Peer> peers)
    : rank_(rank), control_(std::move(control)), peers_(std::move(peers)) {}

uint64_t PeerMonitor::minimum(Counter counter) const {
  uint64_t minimum = UINT64_MAX;
  for (int rank = 0; rank < size(); ++rank) {
    minimum = std::min(minimum, (state_of(rank).*counter).load());
  }
  return minimum;
}

bool PeerMonitor::may_reduce(uint64_t number) const {
  return minimum(&RankState::announced) > number &&
         minimum(&RankState::rounds) == own_state().rounds.load();
}

const Descriptor& PeerMonitor::descriptor_of(int rank, uint64_t number) const {
  return state_of(rank).descriptors[number % kMostInFlight];
}

std::vector<std::byte*> PeerMonitor::buffers_for(uint64_t number) const {
  std::vector<std::byte*> buffers;
  for (int rank = 0; rank < size(); ++rank) {
    const auto& memory = *peers_[static_cast<size_t>(rank)].memory;
    buffers.push_back(memory.data() + descriptor_of(rank, number).offset);
  }
  return buffers;
}

std::string PeerMonitor::mismatch(uint64_t number) const {
  const auto& first = descriptor_of(0, number);
  for (int rank = 1; rank < size(); ++rank) {
    const auto& other = descriptor_of(rank, number);
    if (other.matches(first)) continue;
    return ddp::str(
        "shm: expected every rank to call the same collective number ", number, ", but rank ",
        peers_[0].rank, " called ", to_text(first), " and rank ",
        peers_[static_cast<size_t>(rank)].rank, " ", to_text(other),
        ". Call the same collectives with tensors of equal sizes and dtypes in the same order on "
        "all ranks.");
  }
  return "";
}

bool PeerMonitor::uses_gloo(uint64_t number) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (descriptor_of(rank, number).carrier == Carrier::kGloo) return true;
  }
  return false;
}

std::string PeerMonitor::to_text(const Descriptor& d) const {
  CollectiveCall call;
  call.kind = d.kind;
  if (d.kind == Kind::Barrier) return ddp::to_text(call);
  if (d.carrier == Carrier::kGloo) {
    return ddp::str(
        ddp::to_text(d.kind), " of ", static_cast<c10::ScalarType>(d.dtype), " (through Gloo)");
  }
  call.dtype = static_cast<int8_t>(d.dtype);
  call.tensors = d.tensors;
  call.sizes = d.sizes;
  call.numel = d.numel;
  const auto is_any_of = [&](std::initializer_list<Kind> kinds) { return contains(kinds, d.kind); };
  if (is_any_of({Kind::Broadcast, Kind::Reduce, Kind::Gather, Kind::Scatter})) {
    call.root = peers_[static_cast<size_t>(d.root)].rank;
  }
  if (is_any_of({Kind::AllReduce, Kind::ReduceScatter, Kind::Reduce})) {
    call.reduction = static_cast<int8_t>(d.reduction);
  }
  return ddp::to_text(call);
}

bool PeerMonitor::has_stopped(int rank, uint64_t number) const {
  const auto& state = state_of(rank);
  return state.stopped.load() != Stopped::kNo && state.stopped_at.load() <= number;
}

bool PeerMonitor::has_peer_stopped(uint64_t number) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_ && has_stopped(rank, number)) return true;
  }
  return false;
}

PeerFailure PeerMonitor::failure_of(int rank, uint64_t number) const {
  const auto& peer = peers_[static_cast<size_t>(rank)];
  const auto& state = state_of(rank);
  const auto named = [&](const char* what) {
    return ddp::str("rank ", peer.rank, " (process ", peer.process->pid(), ") ", what);
  };
  if (has_stopped(rank, number)) {
    if (state.stopped.load() == Stopped::kAborted) {
      const auto cause = state.cause.read();
      return {named("has aborted: ") + cause, cause};
    }
    const auto text = named("has left the process group");
    return {text, text};
  }
  // Checked in this order: the rank may have finished its reduce step before its process ended,
  // and its memory is still mapped here.
  if (peer.process->has_ended() && state.reduced.load() <= number &&
      !has_stopped(rank, UINT64_MAX)) {
    const auto text = named("has ended");
    return {text, text};
  }
  return {};
}

PeerFailure PeerMonitor::find_failure(uint64_t number) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_) continue;
    auto failure = failure_of(rank, number);
    if (!failure.what.empty()) return failure;
  }
  return {};
}

std::string PeerMonitor::ranks_at_or_below(Counter counter, uint64_t number) const {
  OutputText text;
  for (int rank = 0; rank < size(); ++rank) {
    const auto at = (state_of(rank).*counter).load();
    if (at > number) continue;
    text << (text.tellp() > 0 ? ", " : "") << "rank " << peers_[static_cast<size_t>(rank)].rank
         << " (at " << at << ")";
  }
  return text.str();
}

std::string PeerMonitor::describe_missing_ranks(uint64_t number) const {
  const auto absent = ranks_at_or_below(&RankState::announced, number);
  if (!absent.empty()) return absent + " did not come";
  const auto late = ranks_at_or_below(&RankState::reduced, number);
  return late.empty() ? "a rank that came is not done" : late + " came and did not do its part";
}

void PeerMonitor::stop(Stopped how, uint64_t completed, const std::string& cause) {
  auto& own = own_state();
  if (own.stopped.load() != Stopped::kNo) return;
  own.stopped_at.store(completed);
  own.cause.write(cause);
  own.stopped.store(how);
  // Ranks that find this rank's memory changed must find that it has stopped: without the fence, a
  // later plain write may become visible before the store.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace ddp::backends::shm
