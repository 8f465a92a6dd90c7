#include "exchange.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "bell.h"

namespace ddp::backends::shm {
namespace {

// How long a rank that waits sleeps before it looks whether the others are still there.
constexpr std::chrono::milliseconds kLookAfterPeers{50};
// How often collectives that nobody waits for are seen to.
constexpr std::chrono::milliseconds kLookIn{2};

// RankBoard::left
constexpr uint32_t kDestroyed = 1;
constexpr uint32_t kGaveUp = 2;

bool has_ended(int pidfd) {
  pollfd event{pidfd, POLLIN, 0};
  return pidfd >= 0 && ::poll(&event, 1, 0) == 1;
}

std::string to_text(const Descriptor& d) {
  const char* kinds[] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"};
  const char* reductions[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};
  std::string text = kinds[static_cast<uint32_t>(d.kind)];
  if (d.kind == Kind::kBarrier) return text;
  text += c10::str(" of ", d.numel, " x ", static_cast<c10::ScalarType>(d.dtype));
  if (d.kind == Kind::kBroadcast) text += c10::str(" from rank ", d.root);
  if (d.kind == Kind::kAllReduce || d.kind == Kind::kReduceScatter) {
    text += c10::str(", ", reductions[d.reduction]);
  }
  return text;
}

std::exception_ptr backend_error(const std::string& text) {
  try {
    TORCH_CHECK_WITH(DistBackendError, false, text);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

Exchange::Exchange(
    int rank, std::shared_ptr<Segment> board, std::vector<Peer> peers,
    std::chrono::milliseconds timeout)
    : rank_(rank),
      board_memory_(std::move(board)),
      board_(reinterpret_cast<Board*>(board_memory_->data())),
      peers_(std::move(peers)),
      timeout_(timeout),
      keeper_([this] { keep_going(); }) {}

Exchange::~Exchange() {
  close();
  for (const auto& peer : peers_) {
    if (peer.pidfd >= 0) ::close(peer.pidfd);
  }
}

void Exchange::close() {
  {
    const std::lock_guard lock(queue_mutex_);
    if (std::exchange(closing_, true)) return;
  }
  something_pending_.notify_all();
  keeper_.join();
  Ended ended;
  {
    const std::lock_guard lock(work_mutex_);
    break_off("the process group was destroyed", kDestroyed, ended);
  }
  tell(ended);
}

void Exchange::set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

void Exchange::check_whole() const {
  const std::lock_guard lock(queue_mutex_);
  TORCH_CHECK_WITH(DistBackendError, broken_because_.empty(), broken_because_);
}

uint64_t Exchange::begin(Call call) {
  auto& own = board_of(rank_);
  std::unique_lock begin_lock(begin_mutex_);
  check_whole();
  uint64_t number = own.begun.load();
  // The descriptor's place is free once all ranks are done with the one that was there.
  while (least(&RankBoard::done) + kMostInFlight <= number) {
    begin_lock.unlock();  // what ends meanwhile may begin others
    wait(number - kMostInFlight, kLookAfterPeers);
    begin_lock.lock();
    check_whole();
    number = own.begun.load();
  }

  own.descriptors[number % kMostInFlight] = call.descriptor;
  const auto timeout = call.timeout.count() < 0 ? timeout_.load() : call.timeout;
  bool first = false;
  {
    const std::lock_guard lock(queue_mutex_);
    first = pending_.empty();
    pending_.push_back(std::make_unique<Pending>(
        Pending{number, timeout, Clock::now() + timeout, std::move(call), nullptr}));
  }
  own.begun.store(number + 1);
  begin_lock.unlock();
  ring(*board_);
  progress();
  if (first && over_.load() <= number) something_pending_.notify_one();
  return number;
}

void Exchange::progress() {
  Ended ended;
  {
    const std::unique_lock lock(work_mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;  // somebody is at it
    progress_locked(ended);
  }
  tell(ended);
}

bool Exchange::wait(uint64_t number, std::chrono::milliseconds at_most) {
  const auto end = Clock::now() + at_most;
  while (true) {
    Ended ended;
    {
      const std::lock_guard lock(work_mutex_);
      progress_locked(ended);
    }
    tell(ended);
    if (over_.load() > number) return true;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    if (left.count() <= 0) return false;
    const auto condition = [&] { return over_.load() > number || can_progress(); };
    if (!sleep_until(*board_, condition, std::min(left, kLookAfterPeers))) look_after_peers();
  }
}

uint64_t Exchange::least(std::atomic<uint64_t> RankBoard::*count) const {
  uint64_t least = UINT64_MAX;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    least = std::min(least, (board_of(rank).*count).load());
  }
  return least;
}

bool Exchange::can_progress() const {
  const auto& own = board_of(rank_);
  const uint64_t done = own.done.load();
  return (done < own.begun.load() && least(&RankBoard::begun) > done) ||
         (over_.load() < done && least(&RankBoard::done) > over_.load());
}

void Exchange::progress_locked(Ended& ended) {
  auto& own = board_of(rank_);
  while (true) {
    Pending* next = nullptr;
    Pending* front = nullptr;
    {
      const std::lock_guard lock(queue_mutex_);
      if (parts_done_ < pending_.size()) next = pending_[parts_done_].get();
      if (parts_done_ > 0) front = pending_.front().get();
    }
    if (next != nullptr && least(&RankBoard::begun) > next->number) {
      do_part(*next);
      ++parts_done_;
      own.done.store(next->number + 1);
      ring(*board_);
    } else if (front != nullptr && least(&RankBoard::done) > front->number) {
      try {
        if (!front->error && front->call.finish) front->call.finish();
      } catch (...) {
        front->error = std::current_exception();
      }
      const std::lock_guard lock(queue_mutex_);
      ended.push_back(std::move(pending_.front()));
      pending_.pop_front();
      --parts_done_;
      over_.fetch_add(1);
    } else {
      return;
    }
  }
}

void Exchange::do_part(Pending& pending) {
  if (const auto text = mismatch(pending); !text.empty()) {
    pending.error = backend_error(text);
    return;
  }
  std::vector<std::byte*> buffers;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    const auto& descriptor = board_of(rank).descriptors[pending.number % kMostInFlight];
    buffers.push_back(peers_[rank].memory->data() + descriptor.offset);
  }
  try {
    if (pending.call.part) pending.call.part(buffers);
  } catch (...) {
    pending.error = std::current_exception();
  }
}

// All ranks see the same descriptors, and so say the same.
std::string Exchange::mismatch(const Pending& pending) const {
  const auto at = [&](int rank) -> const Descriptor& {
    return board_of(rank).descriptors[pending.number % kMostInFlight];
  };
  for (int rank = 1; rank < static_cast<int>(peers_.size()); ++rank) {
    if (at(rank).matches(at(0))) continue;
    return c10::str(
        "shm: expected every rank to call the same collective number ", pending.number,
        ", but rank 0 called ", to_text(at(0)), " and rank ", rank, " ", to_text(at(rank)),
        ". Call the same collectives with tensors of equal sizes and dtypes in the same order on "
        "all ranks.");
  }
  return "";
}

// Ranks without which `pending` cannot end, and that will not come any more.
std::string Exchange::trouble(const Pending& pending) const {
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (rank == rank_) continue;
    const auto& other = board_of(rank);
    const auto left = other.left.load();
    const bool ended = left == 0 && has_ended(peers_[rank].pidfd);
    if (left == 0 && !ended) continue;
    // Read after that: it may have done its part before it went.
    if (other.done.load() > pending.number) continue;
    return c10::str(
        "rank ", rank, " (process ", peers_[rank].pid, ") ",
        ended             ? "has ended"
        : left == kGaveUp ? "has given up"
                          : "has left the process group");
  }
  return "";
}

std::string Exchange::missing(const Pending& pending) const {
  std::ostringstream text;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    const auto& other = board_of(rank);
    if (other.done.load() > pending.number) continue;
    const auto begun = other.begun.load();
    if (begun > pending.number) continue;
    text << (text.tellp() > 0 ? ", " : "") << "rank " << rank << " (at " << begun << ")";
  }
  const auto names = text.str();
  return names.empty() ? "a rank that came is not done" : names + " did not come";
}

void Exchange::look_after_peers() {
  Ended ended;
  {
    const std::lock_guard lock(work_mutex_);
    progress_locked(ended);
    const Pending* front = nullptr;
    {
      const std::lock_guard queue_lock(queue_mutex_);
      if (!pending_.empty()) front = pending_.front().get();
    }
    if (front != nullptr) {
      auto what = trouble(*front);
      if (what.empty() && Clock::now() > front->deadline) {
        what = c10::str("timed out after ", front->timeout.count(), " ms, ", missing(*front));
      }
      if (!what.empty()) {
        break_off(
            c10::str(
                "shm: collective number ", front->number, " (", to_text(front->call.descriptor),
                ") on rank ", rank_, " of ", peers_.size(), ": ", what),
            kGaveUp, ended);
      }
    }
  }
  tell(ended);
}

void Exchange::break_off(const std::string& why, uint32_t how, Ended& ended) {
  {
    const std::lock_guard lock(queue_mutex_);
    if (broken_because_.empty()) broken_because_ = why;
    for (auto& pending : pending_) {
      pending->error = backend_error(broken_because_);
      ended.push_back(std::move(pending));
    }
    over_.fetch_add(pending_.size());
    pending_.clear();
    parts_done_ = 0;
  }
  uint32_t here = 0;
  board_of(rank_).left.compare_exchange_strong(here, how);
  ring(*board_);
}

void Exchange::tell(Ended& ended) {
  for (auto& pending : ended) {
    if (pending->call.tell) pending->call.tell(pending->error);
  }
}

void Exchange::keep_going() {
  int rounds = 0;
  std::unique_lock lock(queue_mutex_);
  while (!closing_) {
    if (pending_.empty()) {
      something_pending_.wait(lock, [this] { return closing_ || !pending_.empty(); });
    } else {
      something_pending_.wait_for(lock, kLookIn, [this] { return closing_; });
    }
    if (closing_) return;
    lock.unlock();
    progress();
    if (++rounds % (kLookAfterPeers / kLookIn) == 0) look_after_peers();
    lock.lock();
  }
}

}  // namespace ddp::backends::shm
