#include "progress_engine.h"

#include <algorithm>

#include <c10/util/Exception.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "base/deadline.h"

namespace ddp::backends::shm {

std::string why_not_started(
    const char* name, int rank, int world_size, const std::exception& error) {
  return ddp::str(
      "shm: expected to start ", name, ", but could not on rank ", rank, " of ", world_size, ": ",
      text_of(error));
}

void warn_callback_threw() noexcept {
  try {
    TORCH_WARN("shm: a callback threw: ", text_of(std::current_exception()));
  } catch (const std::exception&) {
    // The program's warning handler threw.
  }
}

void CollectiveQueue::push(PendingPtr pending) {
  const std::lock_guard lock(mutex_);
  DDP_CHECK_WITH(DistBackendError, abort_reason_.empty(), abort_reason_);
  pending_.push_back(std::move(pending));
}

CollectiveQueue::Next CollectiveQueue::next() {
  const std::lock_guard lock(mutex_);
  Next next;
  if (reduced_ < pending_.size()) next.to_reduce = pending_[reduced_].get();
  if (reduced_ > 0) next.to_complete = pending_.front().get();
  return next;
}

Pending* CollectiveQueue::front() {
  const std::lock_guard lock(mutex_);
  return pending_.empty() ? nullptr : pending_.front().get();
}

PendingPtr CollectiveQueue::pop_completed() {
  const std::lock_guard lock(mutex_);
  auto completed = std::move(pending_.front());
  pending_.pop_front();
  --reduced_;
  if (!pending_.empty()) pending_.front()->deadline = Deadline::in(pending_.front()->timeout);
  completed_.fetch_add(1);
  return completed;
}

PendingPtr CollectiveQueue::pop_aborted() {
  const std::lock_guard lock(mutex_);
  if (abort_reason_.empty() || pending_.empty()) return nullptr;
  auto failed = std::move(pending_.front());
  pending_.pop_front();
  failed->error = backend_error(abort_reason_);
  completed_.fetch_add(1);
  return failed;
}

void CollectiveQueue::abort(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (abort_reason_.empty()) abort_reason_ = why;
  aborted_ = true;
}

std::string CollectiveQueue::abort_reason() {
  const std::lock_guard lock(mutex_);
  return abort_reason_;
}

std::shared_ptr<ProgressEngine> ProgressEngine::make(
    int rank, std::shared_ptr<ControlBlock> control, std::vector<Peer> peers,
    std::shared_ptr<Arena> arena, std::chrono::milliseconds timeout) {
  std::shared_ptr<ProgressEngine> engine(new ProgressEngine(
      PeerMonitor(rank, std::move(control), std::move(peers)), std::move(arena), timeout));
  // The threads own the engine until close(), because one of them may be in a callback that drops
  // the last other reference.
  engine->threads_.add(engine);
  return engine;
}

ProgressEngine::ProgressEngine(
    PeerMonitor monitor, std::shared_ptr<Arena> arena, std::chrono::milliseconds timeout)
    : monitor_(std::move(monitor)),
      arena_(std::move(arena)),
      timeout_(timeout),
      mailbox_(monitor_, *arena_) {}

void ProgressEngine::fail(const std::string& why) {
  if (!owner_.is_this_one()) return;
  {
    const std::lock_guard lock(progress_mutex_);
    abort_locked(why, Stopped::kAborted, why);
  }
  complete_aborted();
}

void ProgressEngine::close() {
  if (!owner_.is_this_one() || closed_.exchange(true)) return;
  progress();  // completes collectives for which the other ranks have done their share
  {
    const std::lock_guard lock(progress_mutex_);
    abort_locked(kGroupDestroyed, Stopped::kDestroyed, "");
  }
  complete_aborted();
  threads_.remove(*this);
}

uint64_t ProgressEngine::start(Call call) {
  const uint64_t number = announce(std::move(call), WhileFull::kProgress);
  progress();
  if (queue_.completed() <= number) threads_.wake_one();
  return number;
}

uint64_t ProgressEngine::announce(Call call) {
  const uint64_t number = announce(std::move(call), WhileFull::kSleep);
  threads_.wake_one();
  return number;
}

uint64_t ProgressEngine::announce(Call call, WhileFull while_full) {
  check_owner();
  auto& own = monitor_.own_state();
  std::unique_lock announce_lock(announce_mutex_);
  uint64_t number = own.announced.load();
  // A descriptor's slot is free once all ranks have reduced the collective that used it before.
  const auto is_full = [&] {
    return monitor_.reduced_by_all() + kMostInFlight <= number && !queue_.is_aborted();
  };
  while (is_full()) {
    announce_lock.unlock();  // callbacks of collectives that complete meanwhile may announce others
    if (while_full == WhileFull::kProgress) {
      wait(number - kMostInFlight, kCheckPeers);
    } else {
      monitor_.doorbell().wait_until([&] { return !is_full(); }, kCheckPeers);
    }
    announce_lock.lock();
    number = own.announced.load();
  }

  const auto timeout = call.timeout.count() < 0 ? timeout_.load() : call.timeout;
  own.descriptors[number % kMostInFlight] = call.descriptor;
  queue_.push(std::make_unique<Pending>(
      Pending{number, timeout, Deadline::in(timeout), std::move(call), nullptr}));
  own.announced.store(number + 1);
  announce_lock.unlock();
  monitor_.doorbell().ring();
  return number;
}

void ProgressEngine::send(Message message) {
  check_owner();
  mailbox_.send(std::move(message));
  progress();
  if (mailbox_.is_active()) threads_.wake_one();
}

void ProgressEngine::receive(Message message) {
  check_owner();
  mailbox_.receive(std::move(message));
  progress();
  if (mailbox_.is_active()) threads_.wake_one();
}

// Messages first: they need no other rank's progress. The collectives one by one: the callback of
// one may wait for later ones.
void ProgressEngine::progress() {
  if (!owner_.is_this_one()) return;
  progress_messages(Mailbox::IfBusy::kReturn);
  while (true) {
    PendingPtr completed;
    {
      const std::unique_lock lock(progress_mutex_, std::try_to_lock);
      if (!lock.owns_lock()) return;  // another thread makes progress
      completed = progress_locked();
    }
    if (!completed) completed = pop_aborted();
    if (!completed) return;
    complete(std::move(completed));
  }
}

bool ProgressEngine::wait(uint64_t number, std::chrono::milliseconds at_most) {
  const auto is_over = [&] { return queue_.completed() > number; };
  return wait_until(is_over, at_most, Mailbox::IfBusy::kReturn);
}

bool ProgressEngine::wait_for_message(
    c10::function_ref<bool()> is_over, std::chrono::milliseconds at_most) {
  return wait_until(is_over, at_most, Mailbox::IfBusy::kWait);
}

bool ProgressEngine::wait_until(
    c10::function_ref<bool()> is_over, std::chrono::milliseconds at_most, Mailbox::IfBusy if_busy) {
  check_owner();
  const auto end = Deadline::in(at_most);
  while (true) {
    progress_messages(if_busy);
    PendingPtr completed;
    {
      const std::lock_guard lock(progress_mutex_);
      completed = progress_locked();
    }
    if (!completed) completed = pop_aborted();
    const bool more = completed != nullptr;
    if (completed) complete(std::move(completed));
    if (is_over()) return true;
    if (more) continue;
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    // In this order: the second condition sees what another thread completes between the two.
    const auto condition = [&] { return can_progress() || is_over(); };
    if (!monitor_.doorbell().wait_until(condition, std::min(left, kCheckPeers))) check_peers();
  }
}

void ProgressEngine::progress_messages(Mailbox::IfBusy if_busy) {
  if (!mailbox_.is_active()) return;
  const auto ends =
      queue_.is_aborted() ? mailbox_.abort(queue_.abort_reason()) : mailbox_.progress(if_busy);
  if (mailbox_.has_refused()) check_peers();  // ends the group, which its sender needs to know
  call(ends);
}

void ProgressEngine::call(const Mailbox::Ends& ends) {
  for (const auto& end : ends) end();
  // A thread that waits for one of them has seen its counters before.
  if (!ends.empty()) monitor_.doorbell().ring();
}

bool ProgressEngine::can_progress() const {
  if (queue_.is_aborted() || mailbox_.can_progress()) return true;
  const auto& own = monitor_.own_state();
  const uint64_t reduced = own.reduced.load();
  const uint64_t completed = queue_.completed();
  return (reduced < own.announced.load() && monitor_.may_reduce(reduced)) ||
         (completed < reduced && monitor_.reduced_by_all() > completed);
}

/// Returns the next collective that is complete or has failed alone; null if there is none yet.
PendingPtr ProgressEngine::progress_locked() {
  auto& own = monitor_.own_state();
  while (!queue_.is_aborted()) {
    const auto next = queue_.next();
    if (next.to_complete != nullptr && monitor_.reduced_by_all() > next.to_complete->number) {
      return try_complete(*next.to_complete);
    }
    auto* pending = next.to_reduce;
    if (pending == nullptr || !monitor_.may_reduce(pending->number)) return nullptr;
    reduce(*pending);
    if (queue_.is_aborted()) return nullptr;
    if (--pending->rounds_left > 0) {
      own.rounds.fetch_add(1);
    } else {
      queue_.mark_reduced();
      own.reduced.store(pending->number + 1);
    }
    monitor_.doorbell().ring();
  }
  return nullptr;
}

PendingPtr ProgressEngine::try_complete(Pending& pending) {
  // Checked after all ranks' reduce steps: a rank that stops later still held its memory then.
  if (monitor_.has_peer_stopped(pending.number)) {
    abort_locked(pending, monitor_.find_failure(pending.number));
    return nullptr;
  }
  if (!pending.error && pending.call.copy_out) pending.error = exception_of(pending.call.copy_out);
  return queue_.pop_completed();
}

void ProgressEngine::reduce(Pending& pending) {
  PeerFailure failure;
  if (monitor_.has_peer_stopped(pending.number)) {
    failure = monitor_.find_failure(pending.number);
  } else {
    try {
      if (pending.rounds_left == 0 && !check_agreement(pending)) return;
      if (pending.call.reduce_step) pending.call.reduce_step(monitor_.buffers_for(pending.number));
      return;
    } catch (...) {
      failure.what = text_of(std::current_exception());
      failure.cause = ddp::str(failure.what, " on rank ", monitor_.own_rank());
    }
  }
  abort_locked(pending, failure);  // the other ranks need this rank's reduce step
}

/// Whether all ranks make the same call. If not, only this collective fails.
bool ProgressEngine::check_agreement(Pending& pending) {
  Agreement agreement;
  agreement.mismatch = monitor_.mismatch(pending.number);
  const bool alike = agreement.mismatch.empty();
  if (alike && pending.call.check_agreement) {
    agreement = pending.call.check_agreement(monitor_.buffers_for(pending.number));
  }
  // A failed operation takes one round, in which no rank copies, whatever its size.
  pending.rounds_left = agreement.mismatch.empty() ? agreement.rounds : 1;
  if (agreement.mismatch.empty()) return true;
  const auto& text = agreement.mismatch;
  pending.error = backend_error(text);
  // Gloo numbers collectives by calls, so the ranks' next ones there would not match.
  if (!alike && monitor_.uses_gloo(pending.number)) abort_locked(text, Stopped::kAborted, text);
  return false;
}

void ProgressEngine::check_peers() {
  if (!owner_.is_this_one()) return;
  {
    const std::lock_guard lock(progress_mutex_);
    if (queue_.is_aborted()) return;
    check_collective_locked();
    check_messages_locked();
  }
  complete_aborted();
}

void ProgressEngine::check_collective_locked() {
  const auto* first = queue_.front();
  if (first == nullptr) return;
  auto failure = monitor_.find_failure(first->number);
  if (failure.what.empty() && std::chrono::steady_clock::now() > first->deadline) {
    failure.what = ddp::str(
        "timed out after ", first->timeout.count(), " ms, ",
        monitor_.describe_missing_ranks(first->number));
    failure.cause = ddp::str(failure.what, " on rank ", monitor_.own_rank());
  }
  if (!failure.what.empty()) abort_locked(*first, failure);
}

void ProgressEngine::check_messages_locked() {
  const auto failure = mailbox_.find_failure();
  if (!failure.what.empty()) abort_locked(failure.what, Stopped::kAborted, failure.cause);
}

void ProgressEngine::abort_locked(const Pending& pending, const PeerFailure& failure) {
  const auto why = ddp::str(
      "shm: collective number ", pending.number, " (", monitor_.to_text(pending.call.descriptor),
      ") on rank ", monitor_.own_rank(), ": ", failure.what);
  abort_locked(why, Stopped::kAborted, failure.cause);
}

void ProgressEngine::abort_locked(const std::string& why, Stopped how, const std::string& cause) {
  monitor_.stop(how, queue_.completed(), cause);
  queue_.abort(why);
  monitor_.doorbell().ring();
}

// Another rank may still be in its reduce step of a collective that failed here.
PendingPtr ProgressEngine::pop_aborted() {
  auto failed = queue_.pop_aborted();
  if (failed) arena_->keep(std::move(failed->call.memory));
  return failed;
}

void ProgressEngine::complete_aborted() {
  if (queue_.is_aborted()) call(mailbox_.abort(queue_.abort_reason()));
  while (auto failed = pop_aborted()) complete(std::move(failed));
}

void ProgressEngine::complete(PendingPtr pending) {
  if (!pending->call.on_complete) return;
  const ProgressThreads::CallbackScope scope;
  try {
    pending->call.on_complete(pending->error);
  } catch (...) {
    warn_callback_threw();  // this thread may make progress for others
  }
}

}  // namespace ddp::backends::shm
