#include "exchange.h"

#include <algorithm>
#include <sstream>
#include <system_error>
#include <utility>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <ddp/error_text.h>

#include "../../deadline.h"
#include "bell.h"

namespace ddp::backends::shm {
namespace {

// How long a rank that waits sleeps before it looks whether the others are still there.
constexpr std::chrono::milliseconds kLookAfterPeers{50};
// How often collectives that nobody waits for are seen to.
constexpr std::chrono::milliseconds kLookIn{2};
constexpr int kKeepers = 2;

// RankBoard::left
constexpr uint32_t kDestroyed = 1;
constexpr uint32_t kGaveUp = 2;

std::string to_text(const Descriptor& d, const std::vector<Peer>& peers) {
  const char* kinds[] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"};
  const char* reductions[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};
  std::string text = kinds[static_cast<uint32_t>(d.kind)];
  if (d.kind == Kind::kBarrier) return text;
  const auto dtype = static_cast<c10::ScalarType>(d.dtype);
  if (d.carrier == Carrier::kGloo) return c10::str(text, " of ", dtype, " (through Gloo)");
  text += c10::str(" of ", d.numel, " x ", dtype);
  if (d.kind == Kind::kBroadcast)
    text += c10::str(" from rank ", peers[static_cast<size_t>(d.root)].rank);
  if (d.kind == Kind::kAllReduce || d.kind == Kind::kReduceScatter) {
    text += c10::str(", ", reductions[d.reduction]);
  }
  return text;
}

}  // namespace

void warn_of_callback() noexcept {
  try {
    TORCH_WARN("shm: a callback threw: ", text_of(std::current_exception()));
  } catch (const std::exception&) {
    // A warning handler that throws.
  }
}

std::shared_ptr<Exchange> Exchange::make(
    int rank, std::shared_ptr<Segment> board, std::vector<Peer> peers, std::shared_ptr<Arena> arena,
    std::chrono::milliseconds timeout) {
  std::shared_ptr<Exchange> exchange(
      new Exchange(rank, std::move(board), std::move(peers), std::move(arena), timeout));
  // The threads own it until close() ends them: one may be in a callback that drops the last other
  // reference.
  try {
    for (int i = 0; i < kKeepers; ++i) {
      exchange->keepers_.emplace_back([exchange] { exchange->keep_going(); });
    }
  } catch (const std::system_error&) {
    exchange->close();
    throw;
  }
  return exchange;
}

Exchange::Exchange(
    int rank, std::shared_ptr<Segment> board, std::vector<Peer> peers, std::shared_ptr<Arena> arena,
    std::chrono::milliseconds timeout)
    : rank_(rank),
      board_memory_(std::move(board)),
      board_(reinterpret_cast<Board*>(board_memory_->data())),
      peers_(std::move(peers)),
      arena_(std::move(arena)),
      timeout_(timeout) {}

void Exchange::fail(const std::string& why) {
  {
    const std::lock_guard lock(work_mutex_);
    break_off_locked(why, kGaveUp, why);
  }
  while (auto failed = pop_broken()) tell(std::move(failed));
}

void Exchange::close() {
  {
    const std::lock_guard lock(queue_mutex_);
    if (std::exchange(closing_, true)) return;
  }
  progress();  // what the others have done need not fail
  {
    const std::lock_guard lock(work_mutex_);
    break_off_locked(kGroupDestroyed, kDestroyed, "");
  }
  while (auto failed = pop_broken()) tell(std::move(failed));
  something_pending_.notify_all();
  for (auto& keeper : keepers_) {
    if (keeper.get_id() == std::this_thread::get_id()) {
      keeper.detach();  // a callback closed the group: its thread goes when that returns
    } else {
      keeper.join();
    }
  }
}

uint64_t Exchange::begin(Call call) {
  const uint64_t number = enter(std::move(call), Meanwhile::Drive);
  progress();
  if (over_.load() > number) return number;
  wake_keeper();
  return number;
}

uint64_t Exchange::announce(Call call) {
  const uint64_t number = enter(std::move(call), Meanwhile::Sleep);
  wake_keeper();
  return number;
}

void Exchange::wake_keeper() {
  const std::lock_guard lock(queue_mutex_);
  if (idle_keepers_ > 0) something_pending_.notify_one();
}

uint64_t Exchange::enter(Call call, Meanwhile meanwhile) {
  auto& own = board_of(rank_);
  std::unique_lock begin_lock(begin_mutex_);
  uint64_t number = own.begun.load();
  // The descriptor's place is free once all ranks are done with the one that was there.
  const auto is_full = [&] {
    return least(&RankBoard::done) + kMostInFlight <= number && !broken_;
  };
  while (is_full()) {
    begin_lock.unlock();  // what ends meanwhile may begin others
    if (meanwhile == Meanwhile::Drive) {
      wait(number - kMostInFlight, kLookAfterPeers);
    } else {
      sleep_until(
          *board_, [&] { return !is_full(); }, kLookAfterPeers);
    }
    begin_lock.lock();
    number = own.begun.load();
  }

  const auto timeout = call.timeout.count() < 0 ? timeout_.load() : call.timeout;
  {
    const std::lock_guard lock(queue_mutex_);
    TORCH_CHECK_WITH(DistBackendError, broken_because_.empty(), broken_because_);
    own.descriptors[number % kMostInFlight] = call.descriptor;
    pending_.push_back(std::make_unique<Pending>(
        Pending{number, timeout, Deadline::in(timeout), std::move(call), nullptr}));
  }
  own.begun.store(number + 1);
  begin_lock.unlock();
  ring(*board_);
  return number;
}

// One collective after the other, each told before the next one ends: a callback may wait for those
// behind its own.
void Exchange::progress() {
  while (true) {
    PendingPtr ended;
    {
      const std::unique_lock lock(work_mutex_, std::try_to_lock);
      if (!lock.owns_lock()) return;  // somebody is at it
      ended = progress_locked();
    }
    if (!ended) ended = pop_broken();
    if (!ended) return;
    tell(std::move(ended));
  }
}

bool Exchange::wait(uint64_t number, std::chrono::milliseconds at_most) {
  const auto end = Deadline::in(at_most);
  while (true) {
    PendingPtr ended;
    {
      const std::lock_guard lock(work_mutex_);
      ended = progress_locked();
    }
    if (!ended) ended = pop_broken();
    const bool more = ended != nullptr;
    if (ended) tell(std::move(ended));
    if (over_.load() > number) return true;
    if (more) continue;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    if (left.count() <= 0) return false;
    // In this order: what another thread ends between the two looks is then seen by the second.
    const auto condition = [&] { return can_progress() || over_.load() > number; };
    if (!sleep_until(*board_, condition, std::min(left, kLookAfterPeers))) look_after_peers();
  }
}

uint64_t Exchange::least(std::atomic<uint64_t> RankBoard::*count) const {
  uint64_t least = UINT64_MAX;
  for (int rank = 0; rank < size(); ++rank) {
    least = std::min(least, (board_of(rank).*count).load());
  }
  return least;
}

// Whether that rank has given collective `number` up: its memory may be anything then.
bool Exchange::has_left(int rank, uint64_t number) const {
  const auto& board = board_of(rank);
  return board.left.load() != 0 && board.left_at.load() <= number;
}

bool Exchange::somebody_left(uint64_t number) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_ && has_left(rank, number)) return true;
  }
  return false;
}

bool Exchange::can_progress() const {
  if (broken_) return true;
  const auto& own = board_of(rank_);
  const uint64_t done = own.done.load();
  const uint64_t over = over_.load();
  return (done < own.begun.load() && least(&RankBoard::begun) > done) ||
         (over < done && least(&RankBoard::done) > over);
}

/// \return the next collective that has ended well or for itself; nothing when there is none yet.
Exchange::PendingPtr Exchange::progress_locked() {
  auto& own = board_of(rank_);
  while (!broken_) {
    Pending* next = nullptr;
    Pending* front = nullptr;
    {
      const std::lock_guard lock(queue_mutex_);
      if (parts_done_ < pending_.size()) next = pending_[parts_done_].get();
      if (parts_done_ > 0) front = pending_.front().get();
    }
    if (front != nullptr && least(&RankBoard::done) > front->number) {
      // Looked at behind everybody's part: who had not left by then still held the memory.
      if (somebody_left(front->number)) {
        give_up_locked(*front, trouble(*front));
        return nullptr;
      }
      try {
        if (!front->error && front->call.finish) front->call.finish();
      } catch (...) {
        front->error = std::current_exception();
      }
      const std::lock_guard lock(queue_mutex_);
      auto ended = std::move(pending_.front());
      pending_.pop_front();
      --parts_done_;
      if (!pending_.empty()) pending_.front()->deadline = Deadline::in(pending_.front()->timeout);
      over_.fetch_add(1);
      return ended;
    }
    if (next == nullptr || least(&RankBoard::begun) <= next->number) return nullptr;
    do_part(*next);
    if (broken_) return nullptr;
    ++parts_done_;
    own.done.store(next->number + 1);
    ring(*board_);
  }
  return nullptr;
}

void Exchange::do_part(Pending& pending) {
  Trouble problem;
  if (somebody_left(pending.number)) {
    problem = trouble(pending);
  } else {
    if (const auto text = mismatch(pending); !text.empty()) {
      pending.error = backend_error(text);
      // The ranks' next collectives in Gloo would not be each other's.
      if (is_in_gloo(pending)) break_off_locked(text, kGaveUp, text);
      return;
    }
    std::vector<std::byte*> buffers;
    for (int rank = 0; rank < size(); ++rank) {
      buffers.push_back(peers_[rank].memory->data() + descriptor_of(rank, pending).offset);
    }
    try {
      if (pending.call.part) pending.call.part(buffers);
      return;
    } catch (...) {
      problem.what = text_of(std::current_exception());
      problem.cause = c10::str(problem.what, " on rank ", peers_[rank_].rank);
    }
  }
  give_up_locked(pending, problem);  // others count on this part
}

const Descriptor& Exchange::descriptor_of(int rank, const Pending& pending) const {
  return board_of(rank).descriptors[pending.number % kMostInFlight];
}

bool Exchange::is_in_gloo(const Pending& pending) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (descriptor_of(rank, pending).carrier == Carrier::kGloo) return true;
  }
  return false;
}

// All ranks see the same descriptors, and so say the same.
std::string Exchange::mismatch(const Pending& pending) const {
  const auto at = [&](int rank) -> const Descriptor& { return descriptor_of(rank, pending); };
  for (int rank = 1; rank < size(); ++rank) {
    if (at(rank).matches(at(0))) continue;
    return c10::str(
        "shm: expected every rank to call the same collective number ", pending.number,
        ", but rank ", peers_[0].rank, " called ", to_text(at(0), peers_), " and rank ",
        peers_[rank].rank, " ", to_text(at(rank), peers_),
        ". Call the same collectives with tensors of equal sizes and dtypes in the same order on "
        "all ranks.");
  }
  return "";
}

// Ranks without which `pending` cannot end, and that will not come any more.
Exchange::Trouble Exchange::trouble(const Pending& pending) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_) continue;
    const auto& process = *peers_[rank].process;
    const auto named = [&](const char* what) {
      return c10::str("rank ", peers_[rank].rank, " (process ", process.pid(), ") ", what);
    };
    if (has_left(rank, pending.number)) {
      if (board_of(rank).left.load() == kGaveUp) {
        const auto cause = board_of(rank).cause.read();
        return {named("has given up: ") + cause, cause};
      }
      const auto text = named("has left the process group");
      return {text, text};
    }
    // Asked in this order: it may have done its part before it ended, and its memory is still here.
    if (process.has_ended() && board_of(rank).done.load() <= pending.number &&
        !has_left(rank, UINT64_MAX)) {
      const auto text = named("has ended");
      return {text, text};
    }
  }
  return {};
}

std::string Exchange::missing(const Pending& pending) const {
  // At the number of the next one that it begins, or is to do its part of.
  const auto those_at = [&](std::atomic<uint64_t> RankBoard::*counter) {
    std::ostringstream text;
    for (int rank = 0; rank < size(); ++rank) {
      const auto number = (board_of(rank).*counter).load();
      if (number > pending.number) continue;
      text << (text.tellp() > 0 ? ", " : "") << "rank " << peers_[rank].rank << " (at " << number
           << ")";
    }
    return text.str();
  };
  const auto absent = those_at(&RankBoard::begun);
  if (!absent.empty()) return absent + " did not come";
  const auto behind = those_at(&RankBoard::done);
  return behind.empty() ? "a rank that came is not done" : behind + " came and did not do its part";
}

std::string Exchange::what_failed(const Pending& pending, const std::string& how) const {
  return c10::str(
      "shm: collective number ", pending.number, " (", to_text(pending.call.descriptor, peers_),
      ") on rank ", peers_[rank_].rank, ": ", how);
}

void Exchange::look_after_peers() {
  {
    const std::lock_guard lock(work_mutex_);
    if (broken_) return;
    const Pending* first = nullptr;  // stays as long as work_mutex_ is held
    {
      const std::lock_guard queue_lock(queue_mutex_);
      if (pending_.empty()) return;
      first = pending_.front().get();
    }
    auto why = trouble(*first);
    if (why.what.empty() && Clock::now() > first->deadline) {
      why.what = c10::str("timed out after ", first->timeout.count(), " ms, ", missing(*first));
      why.cause = c10::str(why.what, " on rank ", peers_[rank_].rank);
    }
    if (!why.what.empty()) give_up_locked(*first, why);
  }
  while (auto failed = pop_broken()) tell(std::move(failed));
}

void Exchange::give_up_locked(const Pending& pending, const Trouble& trouble) {
  break_off_locked(what_failed(pending, trouble.what), kGaveUp, trouble.cause);
}

void Exchange::break_off_locked(const std::string& why, uint32_t how, const std::string& cause) {
  arena_->freeze();
  auto& own = board_of(rank_);
  if (own.left.load() == 0) {
    own.left_at.store(over_.load());
    own.cause.write(cause);
    own.left.store(how);
  }
  {
    const std::lock_guard lock(queue_mutex_);
    if (broken_because_.empty()) broken_because_ = why;
    broken_ = true;
  }
  ring(*board_);
}

Exchange::PendingPtr Exchange::pop_broken() {
  const std::lock_guard lock(queue_mutex_);
  if (broken_because_.empty() || pending_.empty()) return nullptr;
  auto failed = std::move(pending_.front());
  pending_.pop_front();
  failed->error = backend_error(broken_because_);
  over_.fetch_add(1);
  return failed;
}

void Exchange::tell(PendingPtr ended) {
  if (!ended->call.tell) return;
  try {
    ended->call.tell(ended->error);
  } catch (...) {
    warn_of_callback();  // others wait
  }
}

void Exchange::keep_going() {
  int rounds = 0;
  std::unique_lock lock(queue_mutex_);
  while (!closing_) {
    if (pending_.empty()) {
      ++idle_keepers_;
      something_pending_.wait(lock, [this] { return closing_ || !pending_.empty(); });
      --idle_keepers_;
    } else if (futures_ > 0) {
      lock.unlock();
      sleep_until(
          *board_, [this] { return can_progress(); }, kLookIn);
      lock.lock();
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
