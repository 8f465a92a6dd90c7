#include "relay_work.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <ddp/error_text.h>

#include "../../deadline.h"

namespace ddp::backends::shm {
namespace {

// The exchanges' own threads see to them; this is for when those are in callbacks that wait.
constexpr std::chrono::milliseconds kPoll{20};

}  // namespace

RelayWork::RelayWork(
    std::vector<std::shared_ptr<Exchange>> exchanges, int rank, c10d::OpType type,
    const char* title, std::vector<at::Tensor> outputs)
    : ToldWork(rank, type, title, std::move(outputs)), exchanges_(std::move(exchanges)) {
  for (const auto& exchange : exchanges_) exchange->count_future(1);
}

bool RelayWork::wait(std::chrono::milliseconds timeout) {
  const Deadline deadline(timeout);
  std::unique_lock lock(mutex_);
  while (!completed_) {
    auto patience = kPoll;
    if (timeout != kNoTimeout) {
      TORCH_CHECK_WITH(
          DistBackendError, !deadline.passed(), title(), " is not over after the ", timeout.count(),
          " ms that wait() was given.");
      patience = std::min(patience, deadline.left());
    }
    if (cv_.wait_for(lock, patience, [this] { return completed_; })) break;
    lock.unlock();
    for (const auto& exchange : exchanges_) exchange->poll();
    lock.lock();
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void RelayWork::end(const std::exception_ptr& error) noexcept {
  for (const auto& exchange : exchanges_) exchange->count_future(-1);
  finish(error);
  try {
    complete_future(error);
  } catch (...) {
    warn_of_callback();
  }
}

}  // namespace ddp::backends::shm
