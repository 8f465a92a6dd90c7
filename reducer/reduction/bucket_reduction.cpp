#include "reduction/bucket_reduction.h"

#include <functional>
#include <utility>

#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>

namespace ddp {
namespace {

class AllReduction : public BucketReduction {
 public:
  AllReduction(ProcessGroup group, c10::Device device)
      : group_(std::move(group)),
        averages_(group_->getSize() > 1 && capabilities_of(*group_, device).averages) {}

  double scale_of(const Bucket& bucket, const std::optional<double>& scale) const override {
    if (averages(bucket, scale)) return 1;
    return scale.value_or(1.0 / group_->getSize());
  }

  // The status is made of real numbers, in the gradients' dtype.
  bool carries_status(const Bucket& bucket) const override {
    return !bucket.is_sparse() && !bucket.parameters().front().is_complex();
  }

  bool returns_as_packed() const override { return group_->getSize() == 1; }

  InFlight start(
      const Bucket& bucket, size_t /*index*/, bool /*is_last*/,
      const std::optional<double>& scale) override {
    if (group_->getSize() == 1) return {};
    c10d::AllreduceCoalescedOptions options;
    if (averages(bucket, scale)) options.reduceOp = c10d::ReduceOp::AVG;
    auto wires = bucket.wires();
    if (wires.size() == 1) return {group_->allreduce(wires, options), {}};
    return {group_->allreduce_coalesced(wires, options), {}};
  }

 private:
  // Whether the collective itself divides; `scale` is unset on all ranks or on none.
  bool averages(const Bucket& bucket, const std::optional<double>& scale) const {
    return averages_ && !scale && !bucket.is_sparse() &&
           averages_exactly(bucket.storage().all().scalar_type(), group_->getSize());
  }

  const ProcessGroup group_;
  const bool averages_;  // the backend's all-reduce has an average
};

class HookReduction : public BucketReduction {
 public:
  using Hook = std::function<c10::intrusive_ptr<c10::ivalue::Future>(
      GradBucket&, const std::optional<double>& scale)>;

  explicit HookReduction(Hook hook) : hook_(std::move(hook)) {}

  double scale_of(const Bucket& /*bucket*/, const std::optional<double>& /*s*/) const override {
    return 1;
  }
  // A hook may do anything with a bucket, compress it say.
  bool carries_status(const Bucket& /*bucket*/) const override { return false; }

  InFlight start(
      const Bucket& bucket, size_t index, bool is_last,
      const std::optional<double>& scale) override {
    GradBucket view(
        index, is_last, bucket.gradients(), bucket.storage().views(), bucket.parameters());
    InFlight in_flight{{}, hook_(view, scale)};
    DDP_CHECK(in_flight.future, "the communication hook returned no future");
    return in_flight;
  }

 private:
  const Hook hook_;
};

}  // namespace

bool averages_exactly(at::ScalarType dtype, int ranks) {
  const bool is_power_of_two = (ranks & (ranks - 1)) == 0;
  return is_power_of_two || !at::isReducedFloatingType(dtype);
}

std::unique_ptr<BucketReduction> make_all_reduction(ProcessGroup group, c10::Device device) {
  return std::make_unique<AllReduction>(std::move(group), device);
}

std::unique_ptr<BucketReduction> make_hook_reduction(CommHook hook) {
  return std::make_unique<HookReduction>(
      [hook = std::move(hook)](GradBucket& bucket, const auto& /*scale*/) { return hook(bucket); });
}

std::unique_ptr<BucketReduction> make_reduction_in(at::ScalarType dtype, ProcessGroup group) {
  return std::make_unique<HookReduction>(
      [dtype, group = std::move(group)](GradBucket& bucket, const auto& scale) {
        return all_reduce_in(dtype, bucket, group, scale);
      });
}

}  // namespace ddp
