// Which parameters travel together: the buckets' memory, the rebuild, the cap.
#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <ddp/internal/capabilities.h>
#include <ddp/reducer.h>

#include "bucket.h"
#include "bucket_plan.h"
#include "bucket_tuner.h"
#include "bucket_tuning.h"
#include "past_pass.h"
#include "status_board.h"

namespace ddp {
namespace {

std::vector<ParameterExtent> extents_of(const std::vector<NamedParameter>& parameters) {
  std::vector<ParameterExtent> extents;
  for (const auto& p : parameters) {
    extents.push_back(
        {static_cast<int64_t>(p.tensor.nbytes()), p.tensor.scalar_type(), p.tensor.device(),
         p.expect_sparse});
  }
  return extents;
}

// From the backend where it has memory of its own to reduce in, without copies in and out.
at::Tensor make_storage(
    c10d::ProcessGroup& group, int64_t numel, const at::TensorOptions& options) {
  if (group.getSize() > 1 && capabilities_of(group, options.device()).reduces_in_own_memory) {
    return group.getBackend(options.device().type())->allocateTensor(numel, options);
  }
  return at::empty({numel}, options);
}

bool names_each_once(std::vector<size_t> order) {
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != i) return false;
  }
  return true;
}

}  // namespace

void Reducer::build_buckets(std::vector<std::vector<size_t>> plan) {
  const at::NoGradGuard no_grad;
  const auto living =
      options_.gradient_as_bucket_view() ? Bucket::Living::Residents : Bucket::Living::Visitors;
  buckets_.clear();
  buckets_.reserve(plan.size());
  for (size_t b = 0; b < plan.size(); ++b) {
    for (const size_t index : plan[b]) slots_[index].bucket = b;
    const bool last = b + 1 == plan.size();
    buckets_.emplace_back(
        parameters_, std::move(plan[b]), last ? status_->size() : 0, living,
        [group = group_](int64_t numel, const at::TensorOptions& options) {
          return make_storage(*group, numel, options);
        });
    auto& bucket = buckets_.back();
    if (comm_hook_) bucket.keep_out();
    bucket.averages = group_->getSize() > 1 && !bucket.is_sparse() &&
                      capabilities_of(*group_, bucket.storage().device()).averages;
  }
  choose_status_storage();
}

// The status travels for nothing behind the last bucket, where that one is summed as real numbers;
// a communication hook may do anything with a bucket, so beside one it travels alone.
void Reducer::choose_status_storage() {
  const auto& last = buckets_.back();
  status_in_last_bucket_ = !comm_hook_ && !last.is_sparse() && !last.storage().is_complex();
  const auto device = parameters_.front().tensor.device();
  status_->use(
      status_in_last_bucket_ ? last.tail()
                             : at::zeros({status_->size()}, at::dtype(at::kFloat).device(device)));
}

bool Reducer::rebuild_is_due() const {
  return order_ == Order::Recorded || (tuner_ && passes_to_record_ == 0);
}

BucketPlan Reducer::plan_under(
    const std::vector<int64_t>& caps, const std::vector<size_t>& order) const {
  if (!order.empty() && order_ != Order::Kept) {
    return plan_buckets(extents_of(parameters_), caps, order);
  }
  auto plan = plan_buckets(extents_of(parameters_), caps);
  // Gradients come roughly in reverse registration order.
  std::reverse(plan.buckets.begin(), plan.buckets.end());
  std::reverse(plan.limits.begin(), plan.limits.end());
  return plan;
}

// \return  the cap in bytes that this rank would choose; what it measured is the ranks' together.
int64_t Reducer::tune() {
  int64_t bytes = 0;
  for (const auto& bucket : buckets_) bytes += bucket.bytes();
  LinkCost cost;
  or_break_off(
      [] { return std::string("measuring what the link costs"); },
      [&] {
        cost = tuner_->link_cost(bytes, buckets_.size(), [&](c10d::Work& work) {
          wait_for(work, [] { return std::string("the link's cost"); });
        });
      });
  // This rank's input ended early, or all ranks' did.
  if (!tuner_->has_enough() || !std::isfinite(cost.ms_per_byte)) return kDefaultBucketCapBytes;
  tuning_ = choose_bucket_cap(
      extents_of(parameters_), [&](int64_t cap) { return plan_under({cap}, ready_order_); },
      tuner_->step_times(), cost);
  return bytes_of_mb(tuning_->cap_mb);
}

// The order in which all ranks send, and with it the cap.
void Reducer::rebuild_buckets(int source) {
  RECORD_FUNCTION("ddp::rebuild_buckets", c10::ArrayRef<const c10::IValue>());
  if (past_) {
    or_break_off([] { return std::string(kExchangingStatus); }, [&] { wait_for(*past_); });
    past_->works.clear();  // they keep the old buckets' memory
  }
  std::vector<int64_t> mine(ready_order_.begin(), ready_order_.end());
  if (tuner_) mine.push_back(tune());
  auto order = at::tensor(mine, at::kLong).to(parameters_.front().tensor.device());
  std::vector<at::Tensor> tensors{order};
  or_break_off(
      [] { return std::string("agreeing on the order of the buckets"); },
      [&] {
        if (group_->getSize() == 1) return;
        c10d::BroadcastOptions options;
        options.rootRank = source;
        wait_for(
            *group_->broadcast(tensors, options), [] { return std::string("the buckets' order"); });
        ++waits_before_forward_;
      });
  order = order.cpu();
  const auto* begin = order.const_data_ptr<int64_t>();
  const std::vector<size_t> agreed(begin, begin + parameters_.size());
  if (!names_each_once(agreed)) {
    break_off(c10::str(
        rank_text(),
        " did not get an order of the buckets: a rank communicates out of turn. Every rank "
        "has to run the same forward passes"));
  }
  if (tuner_) {
    caps_ = {begin[parameters_.size()]};
    if (!tuning_) tuning_.emplace();
    choose(*tuning_, caps_.front());
    tuner_.reset();
  }
  // Out of memory, say: the others go on to the next collective.
  or_break_off(
      [] { return std::string("rebuilding the buckets"); },
      [&] {
        for (auto& bucket : buckets_) bucket.move_out();
        build_buckets(plan_under(caps_, agreed).buckets);
        if (!options_.gradient_as_bucket_view()) return;
        const at::NoGradGuard no_grad;
        for (auto& bucket : buckets_) bucket.adopt_gradients();
      });
  if (order_ != Order::Kept) order_ = Order::Rebuilt;
  ++rebuilds_;
  rebuilt_at_ = pass_;
  start_pass();
}

}  // namespace ddp
