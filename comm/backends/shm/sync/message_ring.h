#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ddp::backends::shm {

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

}  // namespace ddp::backends::shm
