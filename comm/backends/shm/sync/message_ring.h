#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ddp::backends::shm {

/// How many messages of one rank to another can lie in their ring. Later ones wait for a slot.
constexpr size_t kMostMessages = 64;

/// A message that one rank sends to another.
struct Envelope {
  int32_t tag = 0;
  /// Whether the message was copied for it, so that it outlives what happens to its sender.
  uint32_t is_copy = 0;
  int64_t dtype = 0;  // at::ScalarType
  int64_t numel = 0;
  uint64_t offset = 0;  // of the elements in the sender's segment, in bytes
};

/// The messages of one rank to another, in the order of sending. Message i lies in slot
/// i % kMostMessages. The receiver takes them in any order, because it chooses by tag.
struct MessageRing {
  /// Written by the sender: how many messages were sent. Envelope i is valid once this is above i.
  alignas(64) std::atomic<uint64_t> sent{0};
  /// Written by the receiver: how many messages it has taken, and for each slot one more than the
  /// number of the last message that was taken from it.
  alignas(64) std::atomic<uint64_t> taken{0};
  std::array<std::atomic<uint64_t>, kMostMessages> taken_from{};
  std::array<Envelope, kMostMessages> envelopes;

  /// Whether message `number` has been taken.
  bool has_taken(uint64_t number) const {
    return taken_from[number % kMostMessages].load() > number;
  }
  /// Whether message `number` has a slot, because the one before it there was taken.
  bool has_slot_for(uint64_t number) const {
    return number < kMostMessages || has_taken(number - kMostMessages);
  }
};

}  // namespace ddp::backends::shm
