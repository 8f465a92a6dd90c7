#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace ddp {

/// A piece of work that a thread of `OrderedWorkers` runs.
class Work {
 public:
  virtual ~Work() = default;
  /// Called once, on any of the threads.
  virtual void run() = 0;
};

/// Threads that draw pieces of work, run them in parallel and return them in the order in which
/// they were drawn, never more than `depth` ahead of the consumer.
///
/// An exception, from drawing or from the work, is thrown by the `next` that would have returned
/// that piece. By then, and at the end, the threads are joined and nothing is kept.
///
/// Thread safety: one thread constructs, calls next, stops and destroys.
class OrderedWorkers {
 public:
  /// Returns the next piece of work, or null after the last. One thread at a time calls it.
  using Draw = std::function<std::unique_ptr<Work>()>;

  /// Starts min(workers, depth) threads, as more would never have work.
  ///
  /// \param workers  >= 1.
  /// \param depth  >= 1: pieces drawn and not yet taken.
  OrderedWorkers(size_t workers, size_t depth, Draw draw);
  ~OrderedWorkers() { stop(); }

  OrderedWorkers(const OrderedWorkers&) = delete;
  OrderedWorkers& operator=(const OrderedWorkers&) = delete;

  /// Waits for the next piece to be done and returns it; null at the end and ever after.
  std::unique_ptr<Work> next();

  /// Lets each thread finish its current piece, joins them, and drops pieces that were not
  /// returned.
  void stop();

 private:
  enum class State {
    Drawing,
    Drained,  // the end or an error was reached: the threads end, the pieces before it count
    Stopped,  // nothing more is returned
  };
  struct Ticket {
    size_t number = 0;
    std::unique_ptr<Work> work = nullptr;
  };
  // A result with neither work nor error is the end.
  struct Outcome {
    std::unique_ptr<Work> work = nullptr;
    std::exception_ptr error = nullptr;
  };

  void work_until_drained();
  std::optional<Ticket> draw_next();
  void finish(size_t number, Outcome outcome);

  const size_t depth_;
  const Draw draw_;
  // Held from taking a ticket's number to drawing its work, so that numbers follow the order of
  // draws. Only its holder ever waits for room.
  std::mutex draw_mutex_;

  std::mutex mutex_;  // guards the members below, down to the threads
  std::condition_variable has_room_;
  std::condition_variable finished_;
  State state_ = State::Drawing;
  size_t drawn_ = 0;
  size_t taken_ = 0;
  std::map<size_t, Outcome> outcomes_;

  std::vector<std::thread> threads_;
};

}  // namespace ddp
