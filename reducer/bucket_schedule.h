#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "bucket_plan.h"

namespace ddp {

/// Which gradients travel together, and in which order: first as expected, and once a pass has
/// shown in which order gradients become ready, as the ranks agree on.
///
/// Threads: note_ready() on autograd's; the rest as the Reducer.
class BucketSchedule {
 public:
  /// \param caps  in bytes, as plan_buckets().
  /// \param lasts  no two passes need to be alike: the order of registration stays.
  /// \param plans_at_once  the first buckets are under `caps`; else all go together until the order
  ///        is known, since small buckets would mostly wait for each other.
  /// \param passes  how many have to end before the ranks agree; 0: they never do.
  BucketSchedule(
      std::vector<ParameterExtent> extents, std::vector<int64_t> caps, bool lasts,
      bool plans_at_once, int passes);

  BucketPlan first_plan() const;

  /// The plan under the caps in the expected order, for good.
  BucketPlan settle();

  /// The gradient of a parameter is ready.
  void note_ready(size_t parameter) {
    if (records_) order_[count_.fetch_add(1)] = parameter;
  }

  /// A pass begins in which note_ready() may be called.
  void begin_pass();
  /// A pass that counts has ended.
  ///
  /// \return whether the ranks are to agree on an order now.
  bool end_pass();

  /// As this rank saw it; parameters that did not become ready come last.
  const std::vector<size_t>& order() const { return order_; }
  /// The plan under one cap, in this rank's order.
  BucketPlan plan_under(int64_t cap) const { return plan({cap}, order_); }

  /// What the ranks agreed on; the buckets are due for it from then on.
  ///
  /// \param cap  in bytes, if that was agreed on, too.
  void adopt(std::vector<size_t> order, std::optional<int64_t> cap);
  bool rebuild_is_due() const { return state_ == State::Agreed; }
  /// The buckets stay as they are.
  bool is_final() const { return state_ == State::Final; }
  /// The agreed plan, once.
  ///
  /// \param pass  the first one that it is for.
  BucketPlan take_plan(int64_t pass);

  bool has_rebuilt() const { return rebuilds_ > 0 && !lasts_; }
  int64_t rebuilds() const { return rebuilds_; }
  int64_t rebuilt_at() const { return rebuilt_at_; }

 private:
  enum class State { Recording, Agreed, Final };

  BucketPlan plan(const std::vector<int64_t>& caps, const std::vector<size_t>& order) const;

  const std::vector<ParameterExtent> extents_;
  std::vector<int64_t> caps_;
  const bool lasts_;
  const bool plans_at_once_;
  State state_;
  int passes_left_;
  bool records_ = false;          // this pass shows the order
  std::vector<size_t> order_;     // by place
  std::atomic<size_t> count_{0};  // of order_, those that were seen
  int64_t rebuilds_ = 0;
  int64_t rebuilt_at_ = 0;  // the pass before which the buckets last were; 0: never
};

}  // namespace ddp
