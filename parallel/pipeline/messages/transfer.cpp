#include "pipeline/messages/transfer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/system/start_thread.h>

namespace ddp {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Longer than a step takes: the group's timeout is that of the computing thread's wait, which
// begins later.
constexpr std::chrono::hours kNoLimit{24 * 30};

constexpr const char* kMessageAborted =
    "PipelineStage: expected a message between stages, but its group was aborted.";

}  // namespace

bool has_bytes(const TensorDescription& tensor) {
  return tensor.is_defined && !contains(tensor.sizes, 0);
}

TransferThread::~TransferThread() {
  if (!has_started()) return;
  c10::intrusive_ptr<c10d::Work> message;
  change([&] {
    is_over_ = true;
    message = waits_for_;
  });
  if (message) {
    // Gloo forgets a send whose connection breaks while it writes: then an aborted group does not
    // end the wait for it.
    try {
      message->abort();
    } catch (const std::exception&) {
      // A backend without it ends its messages when the group is aborted.
    }
  }
  thread_.join();
}

void TransferThread::start(std::function<void()> work) {
  thread_ = start_thread([this, work = std::move(work)] { run(work); });
}

void TransferThread::run(const std::function<void()>& work) noexcept {
  try {
    work();
  } catch (...) {
    change([&] { failure_ = std::current_exception(); });
  }
}

void TransferThread::change(c10::function_ref<void()> change) {
  {
    const auto locked = lock();
    change();
  }
  changed_.notify_all();
}

void TransferThread::wait(IsSo is_so, WaitPoint where) {
  const auto timeout = timeout_of(*wire_.group);
  const auto end = Clock::now() + timeout;
  const auto is_over = [&](milliseconds at_most) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    auto locked = lock();
    changed_.wait_for(
        locked, std::clamp(left, milliseconds(0), at_most), [&] { return is_so() || failure_; });
    if (is_so()) return true;
    const auto failure = failure_;
    locked.unlock();
    // Here and not after the wait, because the monitor knows how long it has lasted.
    wire_.monitor->abort_on_error(where, [&] {
      if (failure) std::rethrow_exception(failure);
      DDP_CHECK_WITH(
          DistBackendError, Clock::now() < end, "timed out after ", timeout.count(), " ms");
    });
    return false;
  };
  if (!is_over(milliseconds(0))) wire_.monitor->wait_until(is_over, where, Peers::Some);
}

bool TransferThread::wait_until(IsSo is_so) {
  auto locked = lock();
  changed_.wait(locked, [&] { return is_over_ || is_so(); });
  return !is_over_;
}

void TransferThread::wait_for(const c10::intrusive_ptr<c10d::Work>& message) {
  {
    const auto locked = lock();
    DDP_CHECK_WITH(DistBackendError, !is_over_, kMessageAborted);
    waits_for_ = message;
  }
  const bool has_come = message->wait(kNoLimit);
  const auto locked = lock();
  waits_for_.reset();
  DDP_CHECK_WITH(DistBackendError, has_come, kMessageAborted);
}

}  // namespace ddp
