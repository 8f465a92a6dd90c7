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

/// Calls a store on a thread of its own, so that no other thread blocks in the store.
///
/// A TCPStore's calls end in a `recv` without a limit: if the process that hosts the store is
/// stopped, or its host is gone, they do not return. The thread starts with the first job. A thread
/// that gets no answer from the store is abandoned.
///
/// Thread safety: all members.
class StoreExecutor {
 public:
  using Job = std::function<void(c10d::Store&)>;

  /// \param store  with a connection of its own: calls of one connection wait for each other, and a
  ///         user's call may take long. Opened before it is needed: TCPStore tries to reach a host
  ///         that is gone until its timeout.
  explicit StoreExecutor(c10::intrusive_ptr<c10d::Store> store);
  /// Waits up to half a second for the posted jobs.
  ~StoreExecutor();
  StoreExecutor(const StoreExecutor&) = delete;
  StoreExecutor& operator=(const StoreExecutor&) = delete;

  /// Queues `job`. Its exceptions are dropped. `job` must own what it uses: it may run after the
  /// executor is destroyed.
  void post(Job job);

  /// Runs `query` and waits for its answer.
  ///
  /// \return nothing if the store has not answered within `at_most`.
  /// \throws the exception of `query`.
  template <typename Answer>
  std::optional<Answer> ask(
      std::function<Answer(c10d::Store&)> query, std::chrono::milliseconds at_most) {
    const auto task = std::make_shared<std::packaged_task<Answer(c10d::Store&)>>(std::move(query));
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
