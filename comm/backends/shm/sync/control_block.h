// The state that the ranks of a host write for each other, some kilobytes per rank, and per two
// ranks that send each other messages; and the doorbell on which they wait for each other's writes.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

#include <c10/util/FunctionRef.h>

#include "calls/collective_call.h"

namespace ddp::backends::shm {

/// A futex in shared memory, on which the ranks of a host wait for each other's writes.
///
/// Thread safety: all members, from all processes that map it.
class Doorbell {
 public:
  /// Wakes all waiters. To be called after each write that a waiter may wait for.
  void ring();

  /// Spins a little, then sleeps until `condition` may hold. Returns as soon as the condition
  /// holds, or after `at_most`.
  ///
  /// \return  whether the condition holds.
  bool wait_until(c10::function_ref<bool()> condition, std::chrono::milliseconds at_most);

  /// How many threads sleep in wait_until(), of all processes.
  uint32_t waiters() const { return waiters_.load(); }

 private:
  std::atomic<uint32_t> rings_{0};  // the futex word: each ring that finds a waiter changes it
  std::atomic<uint32_t> waiters_{0};
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");

using Kind = CollectiveKind;

/// Which transport carries a collective.
enum class Carrier : uint32_t { kMemory, kGloo };

/// One collective, as one rank calls it. Two ranks call the same one if all fields except `offset`
/// are equal.
struct Descriptor {
  Kind kind = Kind::Barrier;
  Carrier carrier = Carrier::kMemory;
  int32_t dtype = 0;      // at::ScalarType
  int32_t reduction = 0;  // c10d::ReduceOp::RedOpType
  int32_t root = 0;       // of a broadcast, reduce, gather or scatter
  uint32_t tensors = 1;   // how many tensors hold the elements
  uint64_t sizes = 0;     // a hash of the tensors' sizes, if there may be several
  uint64_t numel = 0;     // of the whole tensor, of which each rank holds a share or all
  uint64_t offset = 0;    // of this rank's tensor in its segment, in bytes

  bool matches(const Descriptor& other) const {
    return kind == other.kind && carrier == other.carrier && dtype == other.dtype &&
           reduction == other.reduction && root == other.root && tensors == other.tensors &&
           sizes == other.sizes && numel == other.numel;
  }
};

/// The result of comparing the ranks' memory for a collective that descriptors do not describe
/// completely. The same on all ranks.
struct Agreement {
  std::string mismatch;  // how the ranks' calls differ; empty: they do not
  uint64_t rounds = 1;   // how often each rank runs its reduce step
};

/// How many collectives a rank may be ahead of the slowest rank.
constexpr size_t kMostInFlight = 256;

/// Why a rank aborted, for the other ranks' errors: cut to fit, and ended by a zero.
class AbortCause {
 public:
  void write(const std::string& text) {
    text.copy(text_.data(), text_.size() - 1);  // the last byte stays zero
  }
  std::string read() const { return text_.data(); }

 private:
  std::array<char, 512> text_{};
};

enum class Stopped : uint32_t { kNo, kDestroyed, kAborted };

/// The state of one rank. Only that rank writes it; all ranks of the host read it.
struct alignas(64) RankState {
  /// How many collectives the rank has announced. Descriptor i is valid once this is above i.
  std::atomic<uint64_t> announced{0};
  /// How many reduce steps the rank has finished. It does not access other ranks' memory for those
  /// collectives any more.
  alignas(64) std::atomic<uint64_t> reduced{0};
  /// Counts the rounds that the rank has finished, but for the last one, over all reduce steps with
  /// several rounds.
  std::atomic<uint64_t> rounds{0};
  /// Not kNo once the rank has destroyed or aborted its group. `stopped_at` is the number of
  /// collectives that it had completed; it completes none after those.
  alignas(64) std::atomic<Stopped> stopped{Stopped::kNo};
  std::atomic<uint64_t> stopped_at{0};
  AbortCause cause;  // written once, before `stopped`
  std::array<Descriptor, kMostInFlight> descriptors;
};

/// How many envelopes of one rank to another can lie in their ring. Later ones wait for a slot.
constexpr size_t kMostMessages = 64;

/// A message that one rank sends to another.
struct Envelope {
  int32_t tag = 0;
  /// Whether the message was copied for it, so that it outlives what happens to its sender.
  uint32_t is_copy = 0;
  int64_t dtype = 0;  // at::ScalarType
  int64_t numel = 0;
  uint64_t offset = 0;  // of the elements in the sender's segment, in bytes
  uint64_t taken = 0;   // the same of a TakenFlag
};

/// Written by the receiver, to the sender's segment, once it has copied the elements.
using TakenFlag = std::atomic<uint32_t>;
static_assert(TakenFlag::is_always_lock_free, "processes share it");

/// The messages of one rank to another, in the order of sending. Envelope i lies in slot
/// i % kMostMessages until the receiver, which chooses by tag and may want a later one first, has
/// read it.
struct MessageRing {
  /// Written by the sender: how many messages were sent. Envelope i is valid once this is above i.
  alignas(64) std::atomic<uint64_t> sent{0};
  /// Written by the receiver: how many envelopes it has read, and how many messages it has taken.
  alignas(64) std::atomic<uint64_t> read{0};
  std::atomic<uint64_t> taken{0};
  std::array<Envelope, kMostMessages> envelopes;

  bool has_slot_for(uint64_t number) const { return number < read.load() + kMostMessages; }
};

/// The beginning of the block. After it come a RankState for each rank, and for each two ranks a
/// flag and a ring of messages.
struct alignas(64) ControlBlock {
  explicit ControlBlock(int ranks) : users(static_cast<uint32_t>(ranks)), ranks(ranks) {}

  Doorbell doorbell;            // rings after each write to a RankState or a ring
  std::atomic<uint32_t> users;  // ranks that have not opened the block, or still have it open
  const int ranks;

  RankState& of(int rank) const { return reinterpret_cast<RankState*>(end_of_this())[rank]; }
  /// Whether the ring was made, which its sender does before the first message. Rings that no
  /// message needs take no memory.
  std::atomic<bool>& has_ring(int from, int to) const {
    return reinterpret_cast<std::atomic<bool>*>(&of(ranks))[from * ranks + to];
  }
  MessageRing& ring(int from, int to) const {
    auto* flags = reinterpret_cast<std::byte*>(&has_ring(0, 0));
    return reinterpret_cast<MessageRing*>(flags + flag_bytes(ranks))[from * ranks + to];
  }

  static ControlBlock* make(std::byte* memory, int ranks) {
    auto* block = new (memory) ControlBlock(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      new (&block->of(rank)) RankState;
      for (int to = 0; to < ranks; ++to) new (&block->has_ring(rank, to)) std::atomic<bool>(false);
    }
    return block;
  }
  static size_t bytes_for(int ranks) {
    const auto count = static_cast<size_t>(ranks);
    return sizeof(ControlBlock) + count * sizeof(RankState) + flag_bytes(ranks) +
           count * count * sizeof(MessageRing);
  }

 private:
  static size_t flag_bytes(int ranks) {
    const auto count = static_cast<size_t>(ranks);
    return (count * count * sizeof(std::atomic<bool>) + 63) / 64 * 64;
  }
  std::byte* end_of_this() const {
    return reinterpret_cast<std::byte*>(const_cast<ControlBlock*>(this + 1));
  }
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share it");
static_assert(std::atomic<Stopped>::is_always_lock_free, "processes share it");

}  // namespace ddp::backends::shm
