#pragma once

#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include <ddp/internal/owner_process.h>

#include "base/deadline.h"

namespace ddp {

/// Runs `call` as a job of another thread, and waits for its result; as Executor::ask.
///
/// \param push  passes the job to the thread. \return  whether it will run.
template <typename Push, typename Call>
auto ask_through(const Push& push, Call call, Deadline::Clock::time_point until)
    -> std::optional<std::invoke_result_t<Call&>> {
  struct Question {
    std::optional<Call> call;
    std::promise<std::invoke_result_t<Call&>> answer;
  };
  const auto question = std::make_shared<Question>(Question{std::move(call), {}});
  auto answer = question->answer.get_future();
  const bool pushed = push([question] {
    try {
      auto value = (*question->call)();
      // Once the caller has the result, nothing that it lent to the call may be in use.
      question->call.reset();
      question->answer.set_value(std::move(value));
    } catch (...) {
      question->call.reset();
      question->answer.set_exception(std::current_exception());
    }
  });
  if (!pushed || answer.wait_until(until) != std::future_status::ready) return std::nullopt;
  return answer.get();
}

/// One thread that runs jobs in the order in which they are pushed.
///
/// Thread safety: push() and ask() from any thread, close() from one. A job may close or destroy
/// the executor. A process that the owner forked does not have the thread: there, close() does
/// nothing.
class Executor {
 public:
  /// Must not throw.
  using Job = std::function<void()>;
  using TimePoint = Deadline::Clock::time_point;

  /// \throws std::system_error  if no thread can start.
  Executor();
  ~Executor() { close(); }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// False in a process that the owner forked.
  bool has_thread() const { return owner_.is_this_one(); }

  /// \return  whether the job will run: it will not if the executor is closing.
  bool push(Job job);

  /// Runs `call`, which returns a value, and waits for its result. Thread-local state of the
  /// caller, such as the current CUDA device, does not apply to the call. It is destroyed before
  /// its result is returned.
  ///
  /// \param call  owns everything that it uses: it may continue after `until`.
  /// \return  the result; nothing if there is none in time.
  /// \throws  the call's exception, with its type.
  template <typename Call>
  auto ask(Call call, TimePoint until) -> std::optional<std::invoke_result_t<Call&>>;

  /// Waits until the pushed jobs are done, and ends the thread. Does not wait if a job calls it.
  /// After `at_most`, the thread is abandoned: it continues, and ends after its jobs or with the
  /// process.
  void close(Deadline::Milliseconds at_most = Deadline::Milliseconds::max());

 private:
  struct State;

  static void run(State& state);

  const OwnerProcess owner_;
  const std::shared_ptr<State> state_;
  std::thread thread_;
};

template <typename Call>
auto Executor::ask(Call call, TimePoint until) -> std::optional<std::invoke_result_t<Call&>> {
  return ask_through([this](Job job) { return push(std::move(job)); }, std::move(call), until);
}

/// Makes a call that may never return, on a thread of its own; as Executor::ask.
///
/// Blocks: host. Cost: one thread start.
template <typename Call>
auto bounded_call(Call call, Executor::TimePoint until) {
  Executor executor;
  auto result = executor.ask(std::move(call), until);
  if (!result) executor.close(Deadline::Milliseconds(0));
  return result;
}

}  // namespace ddp
