#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <utility>

#include <ddp/internal/error_text.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/executor.h"

namespace ddp {

/// Calls a store on a thread of its own, in order, so that no other thread blocks in the store.
///
/// A TCPStore's calls end in a `recv` without a limit: if the process that hosts the store is
/// stopped, or its host is gone, they do not return. A thread that gets no answer from the store is
/// abandoned.
///
/// Thread safety: all members.
class StoreExecutor {
 public:
  using Job = std::function<void(c10d::Store&)>;

  /// \param store  with a connection of its own: calls of one connection wait for each other, and a
  ///         user's call may take long. Opened before it is needed: TCPStore tries to reach a host
  ///         that is gone until its timeout.
  explicit StoreExecutor(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  /// Waits up to half a second for the posted jobs.
  ~StoreExecutor() { executor_.close(std::chrono::milliseconds(500)); }

  /// Queues `job`. Its exceptions are dropped. `job` must own what it uses: it may run after the
  /// executor is destroyed.
  void post(Job job) {
    executor_.push(
        [job = std::move(job), store = store_] { (void)problem_of([&] { job(*store); }); });
  }

  /// Runs `query` and waits for its answer.
  ///
  /// \return nothing if the store has not answered within `at_most`.
  /// \throws the exception of `query`.
  template <typename Answer>
  std::optional<Answer> ask(
      std::function<Answer(c10d::Store&)> query, std::chrono::milliseconds at_most) {
    return executor_.ask(
        [query = std::move(query), store = store_] { return query(*store); },
        Deadline::in(at_most));
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  Executor executor_;
};

}  // namespace ddp
