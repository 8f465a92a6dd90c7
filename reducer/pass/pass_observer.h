#pragma once

#include <cstddef>
#include <cstdint>

#include "reduction/bucket_reduction.h"

namespace ddp {

/// Observes the passes of a reducer, to measure and tune them, without changing them.
///
/// Threads: as the Reducer's; the thread that launches a bucket calls the functions for buckets.
class PassObserver {
 public:
  /// A forward pass begins; `number` is the next reduced pass.
  virtual void begin_forward(int64_t number) { (void)number; }
  /// The next pass will have `buckets` buckets.
  virtual void armed(size_t buckets) { (void)buckets; }
  virtual void begin_backward() {}
  virtual void bucket_ready(size_t b) { (void)b; }
  virtual void begin_pack() {}
  virtual void end_pack() {}
  /// launching(): the call that starts the reduction of a bucket begins; launched(): it returned.
  virtual void launching(size_t b, int64_t bytes) { (void)b, (void)bytes; }
  virtual void launched(size_t b, const BucketReduction::InFlight& in_flight, bool on_cpu) {
    (void)b, (void)in_flight, (void)on_cpu;
  }
  /// The engine has waited for the bucket's reduction, on the host or only on the stream.
  virtual void reduced(size_t b) { (void)b; }
  virtual void autograd_done() {}
  /// All buckets, and the companion's data, have been received.
  virtual void communicated() {}
  /// The pass has ended without an error.
  ///
  /// \param joined  this rank had no input in it.
  virtual void end_pass(bool joined) { (void)joined; }

 protected:
  ~PassObserver() = default;
};

}  // namespace ddp
