#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "buckets/bucket_set.h"
#include "gradients/nonfinite_gradients.h"
#include "reduction/bucket_reduction.h"
#include "status/problem_report.h"
#include "status/status_agreement.h"

namespace ddp {

/// The state of one reduced backward pass: which gradients are there, which buckets were launched,
/// and which collectives run. The engine may keep the previous pass beside the current one.
///
/// Threads: autograd's threads, one per device, use `count` and the counters of buckets; the thread
/// that launches or ends the pass uses the rest.
class BackwardPass {
 public:
  /// One parameter in this pass.
  struct Slot {
    uint32_t bucket = 0;
    uint32_t fired = 0;     // gradients so far
    uint32_t expected = 1;  // gradients until it is ready
    bool ready = false;     // all gradients came, or it is known to be unused
  };
  struct BucketState {
    std::atomic<uint32_t> pending{0};  // parameters that are not ready
    BucketReduction::InFlight in_flight;
    at::Tensor reduced;  // the reduced gradients, until they are copied out
    /// For a model on several devices: the stream of the bucket's device that has its gradients.
    /// The thread of another device may launch the bucket.
    std::optional<c10::Stream> stream;
  };
  /// Whether more gradients of the parameter are expected, this one was the last, or it was one too
  /// many.
  enum class Arrival { Early, Ready, Extra };

  /// Begins pass `number` with no gradient there. Keeps `forwards`, `terms`, `problems` and the
  /// other members that are set between passes.
  ///
  /// \param expected  gradients by parameter; 0 for one that is known to be unused.
  void begin(int64_t number, const BucketSet& buckets, const std::vector<uint32_t>& expected);

  Arrival count(size_t parameter) {
    auto& slot = slots_[parameter];
    ++slot.fired;
    if (counts_only || slot.fired < slot.expected) return Arrival::Early;
    if (slot.fired > slot.expected || slot.ready) return Arrival::Extra;
    slot.ready = true;
    return Arrival::Ready;
  }
  /// Counts a parameter of bucket `b` as ready.
  ///
  /// \return whether all parameters of the bucket are.
  bool complete_one(size_t b) { return buckets_[b].pending.fetch_sub(1) == 1; }

  void mark_unused(size_t parameter);

  /// Whether the gradients of all buckets are there.
  bool is_complete() const;

  int64_t number() const { return number_; }
  const std::vector<Slot>& slots() const { return slots_; }
  BucketState& bucket(size_t b) { return buckets_[b]; }
  const BucketState& bucket(size_t b) const { return buckets_[b]; }

  bool counts_only = false;         // static_graph: gradients are counted, and sent at the end
  bool waits_for_autograd = false;  // sends nothing before: another reducer's pass communicates
  bool captured = false;            // into a graph: the device runs it later
  bool asked = false;               // a rank asked the others, in a status that was read since
  bool joined = false;              // this rank has no input, and serves a pass of the others
  uint64_t forwards = 0;            // the companion's, as this rank's status sent them
  PassTerms terms;
  std::vector<Problem> problems;                      // this rank's, as its status reported them
  NonfiniteGradients nonfinite;                       // where the program has them searched for
  std::optional<StatusAgreement::PendingSum> status;  // all ranks' status, once it was sent
  c10::intrusive_ptr<c10d::Work> status_work;         // where the status has its own collective
  std::vector<c10::intrusive_ptr<c10d::Work>> works;  // those that the host did not wait for
  std::shared_ptr<void> gradient_memory_scope;        // autograd allocates from the group's memory
  std::exception_ptr callback_exception;              // thrown by the on_bucket_reduced() callback

  std::atomic<size_t> next_bucket{0};  // the first that was not launched
  /// Several autograd threads may ask for a launch; one of them launches. Starts at 1, so that no
  /// thread launches before the one that begins the pass.
  std::atomic<uint32_t> launch_requests{1};

 private:
  int64_t number_ = 0;
  std::vector<Slot> slots_;                 // by parameter
  std::unique_ptr<BucketState[]> buckets_;  // in launch order
  size_t bucket_count_ = 0;
};

}  // namespace ddp
