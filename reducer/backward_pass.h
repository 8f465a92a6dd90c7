#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bucket_reduction.h"
#include "bucket_set.h"
#include "problem_report.h"
#include "status_agreement.h"

namespace ddp {

/// What one backward pass that is averaged has come to: which gradients are there, which buckets
/// were launched, and what is under way. A value: the pass before may be kept as another one.
///
/// Threads: `count` and the counters of buckets belong to autograd's threads, one per device; all
/// else to the thread that launches or ends the pass.
class BackwardPass {
 public:
  /// A parameter in this pass.
  struct Slot {
    uint32_t bucket = 0;
    uint32_t fired = 0;     // gradients so far
    uint32_t expected = 1;  // gradients until it is ready
    bool ready = false;     // or known to be unused
  };
  struct BucketState {
    std::atomic<uint32_t> pending{0};  // parameters that are not ready
    BucketReduction::InFlight in_flight;
    at::Tensor reduced;  // what came back and was not copied out yet
  };
  /// What a gradient means.
  enum class Arrival { Early, Ready, Extra };

  /// Begins pass `number` with nothing there. What `forwards`, `problems` and the like say stays.
  ///
  /// \param expected  gradients by parameter; 0 for one that is known to be unused.
  void begin(int64_t number, const BucketSet& buckets, const std::vector<uint32_t>& expected);

  /// Another gradient of `parameter` is there.
  Arrival count(size_t parameter) {
    auto& slot = slots_[parameter];
    ++slot.fired;
    if (counts_only || slot.fired < slot.expected) return Arrival::Early;
    if (slot.fired > slot.expected || slot.ready) return Arrival::Extra;
    slot.ready = true;
    return Arrival::Ready;
  }
  /// A parameter of bucket `b` is ready.
  ///
  /// \return whether all of them are.
  bool complete_one(size_t b) { return buckets_[b].pending.fetch_sub(1) == 1; }

  /// `parameter` gets no gradient in this pass.
  void mark_unused(size_t parameter);

  /// Whether the gradients of all buckets are there.
  bool is_complete() const;

  int64_t number() const { return number_; }
  const std::vector<Slot>& slots() const { return slots_; }
  BucketState& bucket(size_t b) { return buckets_[b]; }
  const BucketState& bucket(size_t b) const { return buckets_[b]; }

  bool counts_only = false;  // static_graph: gradients are counted, and sent at the end
  bool waits = false;        // for autograd's end: another reducer's pass communicates
  bool captured = false;     // for a graph: the device does nothing yet
  bool joined = false;       // the pass of other ranks; this one has no input
  uint64_t forwards = 0;     // training forwards since the last averaged pass
  PassTerms terms;
  std::vector<Problem> problems;                      // this rank's, once they were sent
  std::optional<StatusAgreement::Arrival> status;     // the ranks' together, once it was sent
  c10::intrusive_ptr<c10d::Work> status_work;         // where the status travels alone
  std::vector<c10::intrusive_ptr<c10d::Work>> works;  // those that the host did not wait for
  std::shared_ptr<void> served;              // while autograd makes gradients in the group's memory
  std::exception_ptr after_reduction_threw;  // what was called with reduced gradients threw

  std::atomic<size_t> next_bucket{0};  // the first that was not launched
  /// Each device has an autograd thread; one launches. 1 until the one that begins the pass does.
  std::atomic<uint32_t> launch_requests{1};

 private:
  int64_t number_ = 0;
  std::vector<Slot> slots_;                 // by parameter
  std::unique_ptr<BucketState[]> buckets_;  // in launch order
  size_t bucket_count_ = 0;
};

}  // namespace ddp
