#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <c10/core/DeviceType.h>

#include "calls/collective_call.h"

namespace ddp {

/// The latest collectives of a rank in a group, in the order in which the rank started them.
struct CallList {
  uint64_t first = 0;  // the number of calls[0]; a group's collectives are numbered from 0
  std::vector<CollectiveCall> calls;
  std::vector<int64_t> times_us = {};  // since 1970; of each call, or none

  /// One more than the last number.
  uint64_t end() const { return first + calls.size(); }
  const CollectiveCall& at(uint64_t number) const { return calls.at(number - first); }
  int64_t time_us(uint64_t number) const { return times_us.at(number - first); }
};

/// Keeps the collectives that a rank has started in a group, to compare them when a wait is late,
/// and to find ranks that wait for each other.
///
/// Collectives of CPU tensors and of other tensors are numbered separately: different backends
/// carry them, and threads of autograd may start them, so that their common order is not the same
/// on all ranks. Sends and recvs are not collectives.
///
/// Thread safety: all members.
class CallHistory {
 public:
  /// How many calls are kept. A backward pass starts one for each bucket before it waits for the
  /// first, and shared memory has at most this many pending.
  static constexpr size_t kKept = 256;
  enum class Lane : uint8_t { kCpu, kDevice };
  static constexpr std::array kLanes{Lane::kCpu, Lane::kDevice};

  static Lane lane_of(c10::DeviceType device) {
    return device == c10::DeviceType::CPU ? Lane::kCpu : Lane::kDevice;
  }

  struct Position {
    Lane lane = Lane::kCpu;
    uint64_t number = 0;
    CollectiveCall call;
  };
  struct Progress {
    std::array<uint64_t, kLanes.size()> counts{};  // of all calls, by lane
    std::vector<std::thread::id> threads;          // that made those that are kept; each once
  };

  /// \return  the call's number.
  uint64_t add(Lane lane, const CollectiveCall& call);
  /// Remembers the handle of a call that has started, for find(). Does not use it.
  void set_handle(Lane lane, uint64_t number, const void* handle) {
    ring(lane).handles[number % Ring::kSlots].store(handle, std::memory_order_relaxed);
  }
  /// Removes a call that could not be started, if it is the latest: no backend has counted it.
  void remove_latest(Lane lane, uint64_t number);

  CallList read(Lane lane) const;
  /// Finds the call of a handle that exists; nothing if it is not kept.
  std::optional<Position> find(const void* handle) const;
  Progress progress() const;

 private:
  struct Ring {
    static constexpr size_t kSlots = kKept + 1;  // one for a call that is removed again
    uint64_t count = 0;                          // call n lies at n % kSlots
    std::array<CollectiveCall, kSlots> calls;
    std::array<int64_t, kSlots> times_us{};
    std::array<std::thread::id, kSlots> threads;
    std::array<std::atomic<const void*>, kSlots> handles{};

    uint64_t first_kept() const { return count - std::min<uint64_t>(count, kKept); }
  };
  Ring& ring(Lane lane) { return rings_[static_cast<size_t>(lane)]; }

  mutable std::mutex mutex_;  // guards rings_, but for the handles
  std::array<Ring, kLanes.size()> rings_;
};

}  // namespace ddp
