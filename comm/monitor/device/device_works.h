#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "calls/collective_call.h"

namespace ddp {

/// The collectives of a group that have started on a device, and are not known to have ended.
///
/// It keeps Work::getFutureResult() of each, which the backend's watchdog completes. Unlike the
/// Work, that holds no tensors: a tensor that the program has dropped can be used again in the
/// order of its stream, long before the device is there.
///
/// Threads: all members, from any thread.
class DeviceWorks {
 public:
  using Clock = std::chrono::steady_clock;

  struct Entry {
    uint64_t number = 0;  // of the collectives that were added
    CollectiveCall call;
    Clock::time_point since{};
    c10::intrusive_ptr<c10::ivalue::Future> result;
  };
  struct State {
    std::optional<Entry> oldest;  // that has not ended
    std::optional<Entry> failed;  // that the backend has ended with an error, or after its timeout
  };

  /// Adds a collective of a backend whose watchdog reports results.
  ///
  /// \return  whether look() has to be called from now on: until it finds nothing that has not
  ///          ended.
  bool add(c10d::Work& work, const CollectiveCall& call);

  /// Forgets the collectives that have ended. To be called from one thread.
  State look();

  /// Whether there is a collective that has not ended, or has failed.
  bool has_pending();

 private:
  std::mutex mutex_;  // guards the members below
  std::vector<Entry> entries_;
  uint64_t added_ = 0;
  bool is_watched_ = false;
};

/// "timed out" or "failed": how the backend ended a collective of State::failed.
const char* describe_end(const DeviceWorks::Entry& failed);

}  // namespace ddp
