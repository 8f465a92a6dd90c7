#pragma once

#include <cstddef>
#include <cstdint>

#include "bucket_reduction.h"

namespace ddp {

/// Watches the passes of a reducer: for measuring and tuning, which change nothing of them.
///
/// Threads: as the Reducer's; what concerns buckets comes from the thread that launches them.
class PassObserver {
 public:
  /// A forward pass begins; pass `number` is the next to be averaged.
  virtual void begin_forward(int64_t number) { (void)number; }
  /// That pass will have so many buckets.
  virtual void armed(size_t buckets) { (void)buckets; }
  virtual void begin_backward() {}
  virtual void bucket_ready(size_t b) { (void)b; }
  virtual void begin_pack() {}
  virtual void end_pack() {}
  /// The reduction of a bucket of `bytes` starts, and then has started.
  virtual void launching(size_t b, int64_t bytes) { (void)b, (void)bytes; }
  virtual void launched(size_t b, const BucketReduction::InFlight& in_flight, bool on_cpu) {
    (void)b, (void)in_flight, (void)on_cpu;
  }
  /// The host knows that the bucket is reduced.
  virtual void reduced(size_t b) { (void)b; }
  virtual void autograd_done() {}
  /// Everything has come back.
  virtual void communicated() {}
  /// The pass is over.
  ///
  /// \param joined  this rank had no input in it.
  virtual void end_pass(bool joined) { (void)joined; }

 protected:
  ~PassObserver() = default;
};

}  // namespace ddp
