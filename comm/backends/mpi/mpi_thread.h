#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <ddp/internal/owner_process.h>

#include "backends/mpi/operations/operation.h"
#include "base/deadline.h"
#include "base/executor.h"

namespace ddp::backends::mpi {

/// This process among those that MPI has started.
struct World {
  int rank = 0;
  int size = 1;
  int most_tag = 32767;
  std::string library;                    // its name and version
  MPI_Comm communicator = MPI_COMM_NULL;  // of all ranks, the library's own
};

/// The thread that makes all calls of MPI in this process.
///
/// While operations are under way it tests them, and yields its core between two tests; once
/// nothing has moved for a millisecond, or where other threads want the core, it naps in between.
///
/// Between operations it still calls MPI, ever more rarely, for MPI may complete a send before all
/// of it has left, and send the rest in later calls only: without them, all-reduces between two
/// hosts over Open MPI's TCP hung where a rank had nothing else to do over MPI.
///
/// A collective that MPI never ends does not hold up callers: they wait for works and answers, with
/// limits, and not for this thread.
class MpiThread {
 public:
  using TimePoint = Deadline::Clock::time_point;

  /// Never destroyed: other static objects may use it while the program exits.
  static MpiThread& instance();

  /// Starts MPI in the first call.
  ///
  /// \throws c10::Error  if MPI cannot start in time, is a world of another launcher, or has
  /// failed.
  const World& world(const Deadline& deadline);

  /// Runs `call`, which returns a value, and waits for its result.
  ///
  /// \param call  owns everything that it uses: it may continue after `until`.
  /// \return  nothing if there is no result in time. Then MPI is unusable.
  template <typename Call>
  auto ask(Call call, TimePoint until) -> std::optional<std::invoke_result_t<Call&>>;

  /// Starts an operation, after those that were started before.
  void start(OperationPtr operation);

  /// To be called on the thread, once a group has its communicators.
  void note_connected() { ++connected_; }

  /// Frees the communicators of a group that is not used any more, unless something is under way.
  /// Where the program finalizes MPI, they are free on return.
  void release(std::shared_ptr<Channel> channel) noexcept;

  /// A group has failed: messages stay with MPI, which can no longer be ended.
  void note_failure() { has_failed_ = true; }
  bool has_failed() const { return has_failed_; }

  /// For the static object that is destroyed last: ends MPI if this thread has started it, no group
  /// has failed, nothing is under way and the program exits with code 0. MPI then waits for the
  /// other ranks. After another code it would wait for ranks that wait for this one; MPI's launcher
  /// ends them.
  void finish() noexcept;

 private:
  MpiThread() = default;

  void run() noexcept;
  void push(std::function<void()> task);
  bool run_tasks();
  void idle(std::unique_lock<std::mutex>& lock);
  bool advance_all();
  bool advance(Operation& operation) noexcept;
  void pause(bool has_moved);
  void finalize() noexcept;
  void note_exit(int code) { exits_with_error_ = code != 0; }

  const OwnerProcess owner_{};
  std::mutex world_mutex_;         // guards world_
  std::optional<World> world_;     // set once
  bool initialized_here_ = false;  // set before world_
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> exits_with_error_{false};

  std::mutex mutex_;  // guards tasks_ and thread_
  std::condition_variable wake_;
  std::vector<std::function<void()>> tasks_;
  std::thread thread_;
  std::atomic<bool> has_tasks_{false};
  std::atomic<bool> is_stopping_{false};

  // The thread's own:
  std::vector<OperationPtr> active_;
  int connected_ = 0;                   // groups, whose communicators are not free
  MPI_Comm all_ranks_ = MPI_COMM_NULL;  // World::communicator
  TimePoint last_moved_{};
  TimePoint yields_from_{};  // naps until then
};

template <typename Call>
auto MpiThread::ask(Call call, TimePoint until) -> std::optional<std::invoke_result_t<Call&>> {
  const auto push_task = [this](std::function<void()> task) {
    push(std::move(task));
    return true;
  };
  auto answer = ask_through(push_task, std::move(call), until);
  if (!answer) note_failure();
  return answer;
}

}  // namespace ddp::backends::mpi
