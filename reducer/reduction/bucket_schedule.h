#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ddp/internal/bucket_plan.h>

namespace ddp {

/// Plans the buckets and their order: at first from the expected order of gradients; after a pass
/// has shown the order in which gradients become ready, from the order that the ranks agree on.
///
/// Threads: note_ready() on autograd's; the rest as the Reducer.
class BucketSchedule {
 public:
  /// \param caps  in bytes, as plan_buckets().
  /// \param keeps_registration_order  set where passes may differ, so that no observed order holds.
  /// \param plans_at_once  the first buckets obey `caps`; else all gradients share one bucket until
  ///        the order is known, since small buckets would mostly wait for each other.
  /// \param passes  how many must end before the ranks agree; 0: they never do.
  BucketSchedule(
      std::vector<ParameterExtent> extents, std::vector<int64_t> caps,
      bool keeps_registration_order, bool plans_at_once, int passes);

  BucketPlan first_plan() const;

  /// Makes the plan under the caps in the expected order final, and returns it.
  BucketPlan final_plan();

  void note_ready(size_t parameter) {
    if (records_) order_[count_.fetch_add(1)] = parameter;
  }

  /// Called when a pass begins, before note_ready().
  void begin_pass();
  /// Called when a pass has ended without an error.
  ///
  /// \return whether the ranks must agree on an order now.
  bool end_pass();

  /// The order that this rank saw; parameters that did not become ready come last.
  const std::vector<size_t>& order() const { return order_; }
  /// The plan under one cap, in this rank's order.
  BucketPlan plan_under(int64_t cap) const { return plan({cap}, order_); }

  /// Sets the order that the ranks agreed on; from then on the buckets are due for a rebuild.
  ///
  /// \param cap  in bytes, where the ranks agreed on one, too.
  void set_order(std::vector<size_t> order, std::optional<int64_t> cap);
  /// The order that was set, for another schedule of the same parameters; empty before.
  BucketOrder agreed_order() const;
  bool rebuild_is_due() const { return state_ == State::Agreed; }
  /// Whether the buckets will not be rebuilt any more.
  bool is_final() const { return state_ == State::Final; }
  /// Makes the agreed plan final, and returns it; called once.
  ///
  /// \param pass  the first pass that uses it.
  BucketPlan agreed_plan(int64_t pass);

  bool has_rebuilt() const { return rebuilds_ > 0 && !keeps_registration_order_; }
  int64_t rebuilds() const { return rebuilds_; }
  int64_t rebuilt_at() const { return rebuilt_at_; }

 private:
  enum class State { Recording, Agreed, Final };

  BucketPlan plan(const std::vector<int64_t>& caps, const std::vector<size_t>& order) const;

  const std::vector<ParameterExtent> extents_;
  std::vector<int64_t> caps_;
  std::optional<int64_t> tuned_cap_;  // that caps_ was replaced by
  const bool keeps_registration_order_;
  const bool plans_at_once_;
  State state_;
  int passes_left_;
  bool records_ = false;          // note_ready() records the order of this pass
  std::vector<size_t> order_;     // parameter indices, in the order of readiness
  std::atomic<size_t> count_{0};  // entries of order_ that this pass has recorded
  int64_t rebuilds_ = 0;
  int64_t rebuilt_at_ = 0;  // the pass before which the buckets were last rebuilt; 0: never
};

}  // namespace ddp
