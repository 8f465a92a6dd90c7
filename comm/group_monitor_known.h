// What the files of GroupMonitor share.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/group_monitor.h>

#include "failure_records.h"

namespace ddp {
namespace monitor {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How long a waiting rank stays with the store's thread for its answer.
inline constexpr milliseconds kAnswerPatience{100};
// How long a rank in trouble stays.
inline constexpr milliseconds kStorePatience{2000};
// How long it waits for the answers of its peers' sockets.
inline constexpr milliseconds kProbe{300};
inline constexpr milliseconds kBetweenLooks{50};

/// The likely cause of collectives that do not meet. `with` and `without` name ranks.
std::string uneven_forwards_text(const std::string& with, const std::string& without);

}  // namespace monitor

/// What the store said last.
struct GroupMonitor::Known {
  std::mutex mutex;  // guards what follows
  std::condition_variable answered;
  std::optional<std::string> failure;
  std::vector<FailedAttempt> attempts;
  Question compare;    // that the next question to the store begins with; may be empty
  bool asked = false;  // and not answered yet
  monitor::Clock::time_point asked_at{};
  std::string silence;  // what the store's own limit said when it did not answer
};

}  // namespace ddp
