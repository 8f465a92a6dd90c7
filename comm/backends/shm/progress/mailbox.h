#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "../memory/arena.h"
#include "peer_monitor.h"

namespace ddp::backends::shm {

/// A message to or from another rank of the host, as this rank sends or receives it.
struct Message {
  static constexpr int kAny = -1;

  /// The other rank's place among those of the host; kAny for a message of any of them.
  int peer = kAny;
  int tag = 0;
  /// Contiguous. It is sent as it is if it lies in the arena: the caller does not change it before
  /// the end. Others are copied.
  at::Tensor tensor;
  std::chrono::milliseconds timeout{0};
  /// Runs once at the end, without a lock, with the sender's place among the ranks of the host.
  /// Must neither throw nor wait.
  std::function<void(std::exception_ptr error, int source)> on_end;
};

/// The messages that this rank has not finished sending or receiving.
///
/// A sender puts an envelope into a ring in shared memory, and the receiver copies the elements
/// from the sender's memory. Messages of one sender and tag are received in the order of sending,
/// and receives that fit the same message in the order of their calls, whatever order they are
/// waited for. A message has ended for its sender once it is taken, whatever its size.
///
/// Thread safety: all members.
class Mailbox {
 public:
  using Ends = std::vector<std::function<void()>>;  // calls of on_end

  /// \param monitor, arena  of this rank; they outlive the mailbox.
  Mailbox(const PeerMonitor& monitor, Arena& arena);

  /// \throws c10::DistBackendError  after abort(). c10::OutOfMemoryError  if the arena is full.
  void send(Message message);
  void receive(Message message);

  /// Whether a message that this rank sends or receives has not ended.
  bool is_active() const { return active_ > 0; }
  /// Whether progress() may do something.
  bool can_progress() const;

  enum class IfBusy { kReturn, kWait };
  /// Takes what has arrived and sends what has got a slot. Does not call on_end itself, because the
  /// caller may hold a lock.
  ///
  /// \param if_busy  whether to return where another thread makes progress.
  Ends progress(IfBusy if_busy);

  /// Whether a message did not fit the tensor of its receive. find_failure() tells.
  bool has_refused() const { return has_refused_; }

  /// Why a message can never end: its peer is gone, the timeout has passed, or it does not fit.
  PeerFailure find_failure() const;

  /// Fails all messages, and later ones. The first reason is kept.
  Ends abort(const std::string& why);

 private:
  using Clock = std::chrono::steady_clock;

  struct Sent {
    Message message;
    Clock::time_point deadline;
    at::Tensor taken;     // holds a TakenFlag
    uint64_t number = 0;  // among this rank's messages to the peer
    bool is_in_ring = false;
    bool is_copy = false;
  };
  struct Posted {
    Message message;
    Clock::time_point deadline;
  };
  struct Arrived {
    int from;
    Envelope envelope;
  };
  /// The counts that can_progress() compares, without a lock, for each other rank.
  struct Seen {
    std::atomic<uint64_t> arrived{0};  // of its messages
    std::atomic<uint64_t> read{0};     // of this rank's messages
    std::atomic<uint64_t> taken{0};
  };

  MessageRing* ring(int from, int to) const;
  MessageRing& ring_to(int peer);
  void check_usable() const;
  void progress_locked(Ends& ends);
  void find_arrived();
  void take_arrived(Ends& ends);
  bool take(const Arrived& arrived, const Message& message);
  std::exception_ptr refusal() const;
  void advance_sends(Ends& ends);
  void put_into_ring(Sent& sent);
  PeerFailure first_failure() const;
  void end(Message& message, const std::exception_ptr& error, int source, Ends& ends);
  PeerFailure failure_of(
      const char* call, const Message& message, Clock::time_point deadline) const;

  const PeerMonitor& monitor_;
  Arena& arena_;
  const int rank_;
  std::vector<Seen> seen_;  // by rank
  std::atomic<int> active_{0};
  std::atomic<bool> has_refused_{false};

  mutable std::mutex mutex_;  // guards the members below
  std::deque<Sent> sent_;     // in the order of the calls
  std::deque<Posted> posted_;
  std::deque<Arrived> arrived_;    // and not taken, in the order of each sender
  std::vector<uint64_t> numbers_;  // by rank, of this rank's next message to it
  std::string refused_;            // why a message that was taken does not fit
  std::string abort_reason_;
};

}  // namespace ddp::backends::shm
