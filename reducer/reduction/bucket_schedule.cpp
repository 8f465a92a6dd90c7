#include "reduction/bucket_schedule.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ddp {

BucketSchedule::BucketSchedule(
    std::vector<ParameterExtent> extents, std::vector<int64_t> caps, bool keeps_registration_order,
    bool plans_at_once, int passes)
    : extents_(std::move(extents)),
      caps_(std::move(caps)),
      keeps_registration_order_(keeps_registration_order),
      plans_at_once_(plans_at_once),
      state_(passes > 0 ? State::Recording : State::Final),
      passes_left_(passes),
      order_(extents_.size()) {
  std::iota(order_.begin(), order_.end(), size_t{0});
}

BucketPlan BucketSchedule::first_plan() const {
  return plan(plans_at_once_ ? caps_ : std::vector<int64_t>{kUnlimitedBytes}, {});
}

BucketPlan BucketSchedule::final_plan() {
  state_ = State::Final;
  passes_left_ = 0;
  return plan(caps_, {});
}

void BucketSchedule::begin_pass() {
  records_ = passes_left_ == 1 && !keeps_registration_order_;
  count_ = 0;
}

bool BucketSchedule::end_pass() {
  if (passes_left_ == 0 || --passes_left_ > 0) return false;
  if (std::exchange(records_, false)) {
    std::vector<char> seen(order_.size(), 0);
    auto count = count_.load();
    for (size_t i = 0; i < count; ++i) seen[order_[i]] = 1;
    for (size_t i = order_.size(); i-- > 0;) {
      if (!seen[i]) order_[count++] = i;
    }
  }
  return true;
}

void BucketSchedule::set_order(std::vector<size_t> order, std::optional<int64_t> cap) {
  order_ = std::move(order);
  tuned_cap_ = cap;
  if (cap) caps_ = {*cap};
  state_ = State::Agreed;
  passes_left_ = 0;
}

BucketOrder BucketSchedule::agreed_order() const {
  const bool is_agreed = state_ == State::Agreed || rebuilds_ > 0;
  return is_agreed ? BucketOrder{order_, tuned_cap_} : BucketOrder{};
}

BucketPlan BucketSchedule::agreed_plan(int64_t pass) {
  state_ = State::Final;
  ++rebuilds_;
  rebuilt_at_ = pass;
  return plan(caps_, order_);
}

BucketPlan BucketSchedule::plan(
    const std::vector<int64_t>& caps, const std::vector<size_t>& order) const {
  if (!order.empty() && !keeps_registration_order_) return plan_buckets(extents_, caps, order);
  auto plan = plan_buckets(extents_, caps);
  // Gradients come roughly in reverse registration order.
  std::reverse(plan.buckets.begin(), plan.buckets.end());
  std::reverse(plan.limits.begin(), plan.limits.end());
  return plan;
}

}  // namespace ddp
