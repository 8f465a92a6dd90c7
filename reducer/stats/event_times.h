#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <ddp/reduction_stats.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// The moments of one step as events in a device's streams. The host waits for none of them.
///
/// Threads: those that run a reducer.
class EventTimes {
 public:
  /// An event that several steps may have: the end of one and what the next one counts from.
  using Moment = std::shared_ptr<c10::Event>;

  /// The step begins here, in the current stream of the device.
  ///
  /// \param before  the end of the step before, if it is known.
  EventTimes(c10::Device device, Moment before);

  void arm(size_t buckets);
  void backward();
  void ready(size_t bucket);
  void launched(size_t bucket);
  /// The end of the bucket's collective: a side stream waits for that alone.
  void done(size_t bucket, c10d::Work& work);
  /// The current stream has waited for it: where nothing else is known of its end.
  void done(size_t bucket);
  void computed();
  void end(Moment end);

  /// Whether the device has come to all of them.
  bool are_over() const;
  /// \pre  are_over()
  void write(StepStats& stats) const;

 private:
  struct BucketMoments {
    Moment ready, launched, done;
  };

  template <typename Set>
  void set(size_t bucket, const Set& set);

  const c10::Device device_;
  Moment before_, begin_, backward_, computed_, end_;
  mutable std::mutex mutex_;  // guards the content of `buckets_`
  std::vector<BucketMoments> buckets_;
};

/// The current moment of the device's current stream.
EventTimes::Moment moment_on(c10::Device device);

}  // namespace ddp
