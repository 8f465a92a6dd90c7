// Declarations shared by the files of GroupMonitor.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/group_monitor.h>

#include "monitor/failure_records.h"

namespace ddp {
namespace monitor {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How long a waiting rank waits for an answer of the store's thread.
inline constexpr milliseconds kAnswerTimeout{100};
// How long a failing rank waits for an answer of the store's thread.
inline constexpr milliseconds kStoreTimeout{2000};
// How long a rank waits for the answers of its peers' sockets.
inline constexpr milliseconds kProbeTimeout{300};
inline constexpr milliseconds kCheckInterval{50};

/// Text for ranks with different numbers of forward passes, the likely cause of collectives that do
/// not match. `with` and `without` name ranks.
std::string uneven_forwards_text(const std::string& with, const std::string& without);

}  // namespace monitor

/// The latest answers of the store, shared with the store's thread.
struct GroupMonitor::StoreAnswers {
  std::mutex mutex;  // guards the members below
  std::condition_variable answered;
  std::optional<std::string> failure;
  std::vector<FailedAttempt> attempts;
  StoreQuery compare;  // runs in the next request to the store; may be empty
  bool request_pending = false;
  monitor::Clock::time_point requested_at{};
  std::string silent_error;  // the error of a store that did not answer in time
};

}  // namespace ddp
