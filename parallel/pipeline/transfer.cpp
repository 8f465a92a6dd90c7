#include "pipeline/transfer.h"

#include <algorithm>
#include <chrono>
#include <exception>

#include <ddp/internal/check.h>

namespace ddp {
namespace {

using std::chrono::milliseconds;

// Longer than a step takes: the group's timeout is that of the computing thread's wait, which
// begins later.
constexpr std::chrono::hours kNoLimit{24 * 30};

milliseconds timeout_of_group(c10d::ProcessGroup& group) {
  try {
    return group.getDefaultBackend()->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return std::chrono::minutes(30);  // c10d's, where a backend does not tell
  }
}

}  // namespace

bool has_transfer_threads(at::Device of_tensors, at::Device of_headers) {
  return of_tensors.is_cpu() && of_headers.is_cpu();
}

void TransferWait::wait(const c10::intrusive_ptr<c10d::Work>& work) {
  constexpr const char* kAborted =
      "PipelineStage: expected a message between stages, but its group was aborted.";
  {
    const std::lock_guard lock(mutex_);
    DDP_CHECK_WITH(DistBackendError, !is_over_, kAborted);
    current_ = work;
  }
  const bool has_come = work->wait(kNoLimit);
  const std::lock_guard lock(mutex_);
  current_.reset();
  DDP_CHECK_WITH(DistBackendError, has_come, kAborted);
}

void TransferWait::end() noexcept {
  c10::intrusive_ptr<c10d::Work> current;
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    current = current_;
  }
  if (!current) return;
  try {
    current->abort();
  } catch (const std::exception&) {
    // A backend without it ends its messages when the group is aborted.
  }
}

void wait_for_thread(
    GroupMonitor& monitor, const ProcessGroup& group, c10::function_ref<bool(milliseconds)> is_over,
    WaitPoint where) {
  if (is_over(milliseconds(0))) return;
  using Clock = std::chrono::steady_clock;
  const auto timeout = timeout_of_group(*group);
  const auto end = Clock::now() + timeout;
  const auto is_over_in_time = [&](milliseconds at_most) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    if (is_over(std::clamp(left, milliseconds(0), at_most))) return true;
    DDP_CHECK_WITH(
        DistBackendError, Clock::now() < end, "timed out after ", timeout.count(), " ms");
    return false;
  };
  monitor.abort_on_error(where, [&] { monitor.wait_until(is_over_in_time, where, Peers::Some); });
}

bool has_bytes(const TensorDescription& tensor) {
  return tensor.is_defined &&
         std::find(tensor.sizes.begin(), tensor.sizes.end(), 0) == tensor.sizes.end();
}

}  // namespace ddp
