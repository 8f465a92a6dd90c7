// A rank's samples from a position on, made by workers.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <ddp/sharded_stream.h>

#include "ordered_workers.h"
#include "stream/order.h"

namespace ddp {

/// This rank among those that share a stream.
struct StreamRanks {
  int64_t count = 1;
  int64_t rank = 0;
};

/// A sample, or the error in its place.
class SampleWork final : public Work {
 public:
  explicit SampleWork(DealtRecord dealt) : dealt_(std::move(dealt)) {}
  void run() override {
    try {
      sample_ = dealt_.record.load();
    } catch (...) {
      error_ = std::current_exception();
    }
    dealt_.record.load = nullptr;
  }

  const DealtRecord& dealt() const { return dealt_; }
  std::shared_ptr<void> take() { return std::move(sample_); }
  const std::exception_ptr& error() const { return error_; }

 private:
  DealtRecord dealt_;
  std::shared_ptr<void> sample_;
  std::exception_ptr error_;
};

/// Reads a rank's samples from a position to the end of the epoch.
class StreamPass {
 public:
  StreamPass(
      StreamOrder order, const BufferStart& from, const RankPart& part,
      const ShardedStreamOptions& options)
      : dealer_(std::move(order), from, part) {
    if (options.workers() == 0) return;
    workers_.emplace(
        static_cast<size_t>(options.workers()), static_cast<size_t>(options.depth()),
        [this]() -> std::unique_ptr<Work> { return drawn(); });
  }

  /// \return null at the end. \throws  what reading throws: the pass is over then.
  std::unique_ptr<SampleWork> next() {
    if (workers_) {
      return std::unique_ptr<SampleWork>(static_cast<SampleWork*>(workers_->next().release()));
    }
    auto work = drawn();
    if (work) work->run();
    return work;
  }

  std::string place(const detail::StreamMark& mark) const {
    const auto& order = dealer_.order();
    return order.source->place(order.files[static_cast<size_t>(mark.file)], mark);
  }

 private:
  std::unique_ptr<SampleWork> drawn() {
    auto dealt = dealer_.next();
    return dealt ? std::make_unique<SampleWork>(std::move(*dealt)) : nullptr;
  }

  RecordDealer dealer_;
  std::optional<OrderedWorkers> workers_;  // joined before the dealer goes
};

}  // namespace ddp
