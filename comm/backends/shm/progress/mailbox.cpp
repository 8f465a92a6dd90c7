#include "mailbox.h"

#include <cstring>
#include <utility>

#include <c10/core/ScalarType.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "../memory/tensors.h"
#include "backends/message_check.h"
#include "base/deadline.h"

namespace ddp::backends::shm {
namespace {

// A tensor in the arena up to this size is copied, so that it arrives also if its sender leaves.
constexpr size_t kMostBytesOfShort = size_t{64} << 10;

TakenFlag& flag_at(std::byte* place) { return *reinterpret_cast<TakenFlag*>(place); }

}  // namespace

Mailbox::Mailbox(const PeerMonitor& monitor, Arena& arena)
    : monitor_(monitor),
      arena_(arena),
      rank_(monitor.own_place()),
      seen_(static_cast<size_t>(monitor.size())),
      numbers_(static_cast<size_t>(monitor.size())) {}

MessageRing* Mailbox::ring(int from, int to) const {
  const auto& control = monitor_.control();
  return control.has_ring(from, to) ? &control.ring(from, to) : nullptr;
}

MessageRing& Mailbox::ring_to(int peer) {
  const auto& control = monitor_.control();
  auto& ring = control.ring(rank_, peer);
  if (!control.has_ring(rank_, peer)) {
    new (&ring) MessageRing;
    control.has_ring(rank_, peer) = true;
  }
  return ring;
}

void Mailbox::check_usable() const {
  DDP_CHECK_WITH(
      DistBackendError, abort_reason_.empty(),
      "shm: expected a working process group, but it failed on rank ", monitor_.own_rank(), ": ",
      abort_reason_);
}

void Mailbox::send(Message message) {
  Sent sent;
  sent.is_copy =
      !arena_.offset_of(message.tensor).has_value() || message.tensor.nbytes() <= kMostBytesOfShort;
  if (sent.is_copy) {
    const auto copy = arena_.allocate(
        message.tensor.numel(), message.tensor.scalar_type(), Arena::OnRelease::kKeep);
    assign(copy, message.tensor);
    message.tensor = copy;
  }
  sent.taken = arena_.allocate(sizeof(TakenFlag), at::kByte, Arena::OnRelease::kKeep);
  new (bytes_of(sent.taken)) TakenFlag(0);
  sent.deadline = Deadline::in(message.timeout);
  sent.message = std::move(message);
  const std::lock_guard lock(mutex_);
  check_usable();
  sent.number = numbers_[static_cast<size_t>(sent.message.peer)]++;
  sent_.push_back(std::move(sent));
  ++active_;
}

void Mailbox::receive(Message message) {
  const std::lock_guard lock(mutex_);
  check_usable();
  const auto deadline = Deadline::in(message.timeout);
  posted_.push_back({std::move(message), deadline});
  ++active_;
}

bool Mailbox::can_progress() const {
  if (!is_active()) return false;
  for (int peer = 0; peer < monitor_.size(); ++peer) {
    const auto& seen = seen_[static_cast<size_t>(peer)];
    const auto* from = ring(peer, rank_);
    if (from != nullptr && from->sent.load() > seen.arrived.load()) return true;
    const auto* to = ring(rank_, peer);
    if (to == nullptr) continue;
    if (to->read.load() > seen.read.load() || to->taken.load() > seen.taken.load()) return true;
  }
  return false;
}

Mailbox::Ends Mailbox::progress(IfBusy if_busy) {
  Ends ends;
  if (!is_active()) return ends;
  std::unique_lock lock(mutex_, std::defer_lock);
  if (if_busy == IfBusy::kWait) {
    lock.lock();
  } else if (!lock.try_lock()) {
    return ends;
  }
  if (abort_reason_.empty()) progress_locked(ends);
  return ends;
}

void Mailbox::progress_locked(Ends& ends) {
  find_arrived();
  take_arrived(ends);
  has_refused_ = !refused_.empty();
  advance_sends(ends);
}

void Mailbox::find_arrived() {
  for (int from = 0; from < monitor_.size(); ++from) {
    auto* messages = ring(from, rank_);
    if (messages == nullptr) continue;
    auto& seen = seen_[static_cast<size_t>(from)].arrived;
    const uint64_t sent = messages->sent.load();
    if (seen.load() == sent) continue;
    for (uint64_t number = seen.load(); number < sent; ++number) {
      arrived_.push_back({from, messages->envelopes[number % kMostMessages]});
    }
    seen = sent;
    messages->read = sent;
    monitor_.doorbell().ring();  // for a sender that waits for a slot
  }
}

void Mailbox::take_arrived(Ends& ends) {
  std::vector<bool> is_lost(static_cast<size_t>(monitor_.size()));  // and what came after it
  for (auto it = arrived_.begin(); it != arrived_.end() && refused_.empty();) {
    const auto& envelope = it->envelope;
    const auto fits = [&](const Posted& posted) {
      const auto& wanted = posted.message;
      return wanted.tag == envelope.tag &&
             (wanted.peer == Message::kAny || wanted.peer == it->from);
    };
    const auto posted = find_if(posted_, fits);
    auto&& lost = is_lost[static_cast<size_t>(it->from)];
    if (posted != posted_.end() && !lost) lost = !take(*it, posted->message);
    if (posted == posted_.end() || lost) {
      ++it;
      continue;
    }
    end(posted->message, refusal(), it->from, ends);
    posted_.erase(posted);
    it = arrived_.erase(it);
  }
}

/// Copies a message, or finds that it does not fit.
///
/// \return  false if its sender has stopped, and may have written something else to its memory.
bool Mailbox::take(const Arrived& arrived, const Message& message) {
  const auto& envelope = arrived.envelope;
  auto* const senders = monitor_.memory_of(arrived.from);
  const auto& tensor = message.tensor;
  refused_ = problem_of_message(
      {envelope.numel, envelope.dtype}, tensor, monitor_.rank_at(arrived.from), message.tag,
      monitor_.own_rank(), monitor_.size());
  if (!refused_.empty()) return true;
  if (tensor.numel() > 0) std::memcpy(bytes_of(tensor), senders + envelope.offset, tensor.nbytes());
  std::atomic_thread_fence(std::memory_order_acquire);  // the copy before the look
  if (envelope.is_copy == 0 && monitor_.has_stopped(arrived.from)) return false;
  flag_at(senders + envelope.taken) = 1;
  ++ring(arrived.from, rank_)->taken;
  monitor_.doorbell().ring();
  return true;
}

/// The error of the receive whose message does not fit: the caller's own, and not a peer's.
std::exception_ptr Mailbox::refusal() const {
  return exception_of([&] { DDP_CHECK(refused_.empty(), refused_); });
}

void Mailbox::advance_sends(Ends& ends) {
  for (int peer = 0; peer < monitor_.size(); ++peer) {
    const auto* messages = ring(rank_, peer);
    if (messages == nullptr) continue;
    auto& seen = seen_[static_cast<size_t>(peer)];
    seen.read = messages->read.load();
    seen.taken = messages->taken.load();
  }
  for (auto it = sent_.begin(); it != sent_.end();) {
    if (!it->is_in_ring) put_into_ring(*it);
    if (flag_at(bytes_of(it->taken)) == 0) {
      ++it;
      continue;
    }
    end(it->message, nullptr, rank_, ends);
    it = sent_.erase(it);
  }
}

/// Does nothing if there is no slot.
void Mailbox::put_into_ring(Sent& sent) {
  const auto& message = sent.message;
  auto& messages = ring_to(message.peer);
  if (messages.sent.load() != sent.number || !messages.has_slot_for(sent.number)) return;
  Envelope envelope;
  envelope.tag = message.tag;
  envelope.is_copy = sent.is_copy ? 1 : 0;
  envelope.dtype = static_cast<int64_t>(message.tensor.scalar_type());
  envelope.numel = message.tensor.numel();
  envelope.offset = arena_.offset_of(message.tensor).value_or(0);
  envelope.taken = arena_.offset_at(bytes_of(sent.taken));
  messages.envelopes[sent.number % kMostMessages] = envelope;
  messages.sent = sent.number + 1;
  sent.is_in_ring = true;
  monitor_.doorbell().ring();
}

void Mailbox::end(Message& message, const std::exception_ptr& error, int source, Ends& ends) {
  --active_;
  ends.push_back([on_end = std::move(message.on_end), error, source] { on_end(error, source); });
}

PeerFailure Mailbox::failure_of(
    const char* call, const Message& message, Clock::time_point deadline) const {
  const bool any = message.peer == Message::kAny;
  const auto what =
      any ? ddp::str(call, " from any rank with tag ", message.tag)
          : ddp::str(call, ", rank ", monitor_.rank_at(message.peer), ", tag ", message.tag);
  PeerFailure failure;
  bool all_failed = true;
  for (int peer = 0; peer < monitor_.size(); ++peer) {
    if (peer == rank_ || (!any && peer != message.peer)) continue;
    auto of_peer = monitor_.failure_of(peer);
    if (of_peer.what.empty()) all_failed = false;
    if (failure.what.empty()) failure = std::move(of_peer);
  }
  if (!failure.what.empty() && all_failed) {
    failure.what = ddp::str("shm: ", what, ", on rank ", monitor_.own_rank(), ": ", failure.what);
    return failure;
  }
  if (Clock::now() <= deadline) return {};
  const auto late = ddp::str(
      "shm: ", what, ", timed out after ", message.timeout.count(), " ms on rank ",
      monitor_.own_rank());
  return {late, late};
}

PeerFailure Mailbox::find_failure() const {
  if (!is_active() && !has_refused()) return {};
  // A thread that copies a message looks again afterwards.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return {};
  if (!refused_.empty()) return {refused_, refused_};
  auto failure = first_failure();
  // In this order: what a rank did before it stopped is not lost.
  return can_progress() ? PeerFailure() : failure;
}

PeerFailure Mailbox::first_failure() const {
  for (const auto& posted : posted_) {
    auto failure = failure_of("recv", posted.message, posted.deadline);
    if (!failure.what.empty()) return failure;
  }
  for (const auto& sent : sent_) {
    auto failure = failure_of("send", sent.message, sent.deadline);
    if (!failure.what.empty()) return failure;
  }
  return {};
}

Mailbox::Ends Mailbox::abort(const std::string& why) {
  Ends ends;
  const std::lock_guard lock(mutex_);
  if (!abort_reason_.empty()) return ends;
  abort_reason_ = why;
  const auto error = backend_error(why);
  for (auto& sent : sent_) {
    end(sent.message, error, rank_, ends);
    if (!sent.is_in_ring) continue;
    // The receiver may still copy it.
    for (const auto& memory : {sent.message.tensor, sent.taken}) {
      arena_.keep(std::make_shared<at::Tensor>(memory));
    }
  }
  for (auto& posted : posted_) end(posted.message, error, rank_, ends);
  sent_.clear();
  posted_.clear();
  arrived_.clear();
  return ends;
}

}  // namespace ddp::backends::shm
