#include "monitor/abort_calls.h"

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/owner_process.h>

#include "base/deadline.h"
#include "base/executor.h"

namespace ddp {
namespace {

struct Running {
  const OwnerProcess owner{};  // a process that it forked has none of its threads
  std::mutex mutex;            // guards the members below
  std::condition_variable changed;
  int aborts = 0;
};

// Never destroyed: the threads may go on while static objects are destroyed.
Running& running() {
  static auto* instance = new Running;
  return *instance;
}

/// Counts as a running abort as long as it exists.
std::shared_ptr<void> count_running() {
  {
    const std::lock_guard lock(running().mutex);
    ++running().aborts;
  }
  return {nullptr, [](void*) {
            const std::lock_guard lock(running().mutex);
            --running().aborts;
            running().changed.notify_all();
          }};
}

struct Abort {
  std::shared_ptr<void> counted = count_running();
  std::function<void()> call;  // destroyed first: it may own the backend

  // A backend of the user's own may throw. Why the job failed matters more.
  void operator()() const { problem_of(call); }
};

}  // namespace

void call_aborts(std::vector<std::function<void()>> aborts, std::chrono::milliseconds at_most) {
  std::deque<Executor> threads;
  for (auto& call : aborts) {
    Abort abort;
    abort.call = std::move(call);
    try {
      threads.emplace_back().push(abort);
    } catch (const std::system_error&) {
      abort();  // there are no more threads
    }
  }
  const Deadline deadline(at_most);
  for (auto& thread : threads) thread.close(deadline.left());
}

void wait_for_aborts(std::chrono::milliseconds at_most) {
  auto& all = running();
  if (!all.owner.is_this_one()) return;
  std::unique_lock lock(all.mutex);
  all.changed.wait_for(lock, at_most, [&] { return all.aborts == 0; });
}

}  // namespace ddp
