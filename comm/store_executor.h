#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

/// Talks to a store on a thread of its own, so that nobody else waits for the store.
///
/// A TCPStore's calls end in a `recv` without a limit: where the process that hosts the store is
/// stopped, or its host is gone, they do not return. The thread starts with the first job. A thread
/// that the store does not answer is left behind.
///
/// Thread safety: all members.
class StoreExecutor {
 public:
  using Job = std::function<void(c10d::Store&)>;

  /// \param store  over a connection of its own: calls of one connection wait for each other, and a
  ///         user's may take long. Opened before it is needed: TCPStore looks for a host that is
  ///         gone until its timeout is over.
  explicit StoreExecutor(c10::intrusive_ptr<c10d::Store> store);
  /// Waits a moment for the jobs that are posted.
  ~StoreExecutor();
  StoreExecutor(const StoreExecutor&) = delete;
  StoreExecutor& operator=(const StoreExecutor&) = delete;

  /// Queues `job`. What `job` throws is dropped. `job` owns what it touches: it may run after the
  /// executor is gone.
  void post(Job job);

  /// Runs `question` and waits for its answer.
  ///
  /// \return nothing when the store has not answered within `at_most`.
  /// \throws what `question` throws.
  template <typename Answer>
  std::optional<Answer> ask(
      std::function<Answer(c10d::Store&)> question, std::chrono::milliseconds at_most) {
    const auto task =
        std::make_shared<std::packaged_task<Answer(c10d::Store&)>>(std::move(question));
    auto answer = task->get_future();
    post([task](c10d::Store& store) { (*task)(store); });
    if (answer.wait_for(at_most) != std::future_status::ready) return std::nullopt;
    return answer.get();
  }

 private:
  struct State;

  static void run(State& state);

  std::shared_ptr<State> state_;
};

}  // namespace ddp
