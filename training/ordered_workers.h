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

/// A piece of work that a thread of `OrderedWorkers` does.
class Work {
 public:
  virtual ~Work() = default;
  /// Once, on any of the threads.
  virtual void run() = 0;
};

/// Threads that draw pieces of work, do them side by side and hand them out in the order in which
/// they were drawn, never more than `depth` ahead of the one who takes them.
///
/// An exception, from drawing or from the work, is thrown by the `next` that would have handed out
/// that piece. Then, and at the end, the threads are already joined and nothing is kept.
///
/// Thread safety: one thread constructs, takes, stops and destroys.
class OrderedWorkers {
 public:
  /// The next piece of work, or null after the last. One thread at a time calls it.
  using Draw = std::function<std::unique_ptr<Work>()>;

  /// Starts min(workers, depth) threads, as more would never have anything to do.
  ///
  /// \param workers  >= 1.
  /// \param depth  >= 1: pieces drawn and not yet taken.
  OrderedWorkers(size_t workers, size_t depth, Draw draw);
  ~OrderedWorkers() { stop(); }

  OrderedWorkers(const OrderedWorkers&) = delete;
  OrderedWorkers& operator=(const OrderedWorkers&) = delete;

  /// Waits for the next piece to be done and hands it out; null at the end and ever after.
  std::unique_ptr<Work> next();

  /// Lets each thread finish what it has in hand, joins them, and drops what was not taken.
  void stop();

 private:
  enum class State {
    Drawing,
    Drained,  // the end or an error was drawn or made: the threads end, the pieces before it count
    Stopped,  // no more is taken
  };
  struct Ticket {
    size_t number = 0;
    std::unique_ptr<Work> work = nullptr;
  };
  // Neither: the end.
  struct Outcome {
    std::unique_ptr<Work> work = nullptr;
    std::exception_ptr error = nullptr;
  };

  void work_until_drained();
  std::optional<Ticket> draw_next();
  void finish(size_t number, Outcome outcome);

  const size_t depth_;
  const Draw draw_;
  // Held from a ticket's number to its work, so that numbers follow the order of draws. Its holder
  // is the only one who ever waits for room.
  std::mutex turn_;

  std::mutex mutex_;  // guards what follows, down to the threads
  std::condition_variable room_;
  std::condition_variable finished_;
  State state_ = State::Drawing;
  size_t drawn_ = 0;
  size_t taken_ = 0;
  std::map<size_t, Outcome> outcomes_;

  std::vector<std::thread> threads_;
};

}  // namespace ddp
