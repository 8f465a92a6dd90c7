#include "bucket_reduction.h"

#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <ddp/internal/capabilities.h>

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
    return !bucket.is_sparse() && !bucket.storage().is_complex();
  }

  InFlight start(
      const Bucket& bucket, size_t /*index*/, bool /*is_last*/,
      const std::optional<double>& scale) override {
    if (group_->getSize() == 1) return {};
    c10d::AllreduceOptions options;
    if (averages(bucket, scale)) options.reduceOp = c10d::ReduceOp::AVG;
    std::vector<at::Tensor> wire{bucket.is_sparse() ? bucket.gradients() : bucket.wire()};
    return {group_->allreduce(wire, options), {}};
  }

 private:
  // The mean; `scale` is unset on all ranks or on none.
  bool averages(const Bucket& bucket, const std::optional<double>& scale) const {
    return averages_ && !scale && !bucket.is_sparse();
  }

  const ProcessGroup group_;
  const bool averages_;  // in the collective itself
};

class HookReduction : public BucketReduction {
 public:
  explicit HookReduction(CommHook hook) : hook_(std::move(hook)) {}

  double scale_of(const Bucket& /*bucket*/, const std::optional<double>& /*s*/) const override {
    return 1;
  }
  // A hook may do anything with a bucket.
  bool carries_status(const Bucket& /*bucket*/) const override { return false; }

  InFlight start(
      const Bucket& bucket, size_t index, bool is_last,
      const std::optional<double>& /*scale*/) override {
    GradBucket view(index, is_last, bucket.gradients(), bucket.views(), bucket.parameters());
    InFlight in_flight{{}, hook_(view)};
    TORCH_CHECK(in_flight.future, "the communication hook returned no future");
    return in_flight;
  }

 private:
  const CommHook hook_;
};

// What a communication hook's future holds: a tensor, or a list of one, as c10d's work gives.
at::Tensor tensor_of(const c10::IValue& value) {
  if (value.isTensorList() && value.toTensorList().size() == 1) return value.toTensorList().get(0);
  TORCH_CHECK(
      value.isTensor(), "expected the communication hook's future to hold a tensor, got ",
      value.tagKind());
  return value.toTensor();
}

std::string describe_result(const at::Tensor& t) {
  if (!t.defined()) return "an undefined tensor";
  return c10::str(
      t.numel(), " elements of ", t.scalar_type(), " on ", t.device(), ", layout ", t.layout());
}

}  // namespace

std::unique_ptr<BucketReduction> make_all_reduction(ProcessGroup group, c10::Device device) {
  return std::make_unique<AllReduction>(std::move(group), device);
}

std::unique_ptr<BucketReduction> make_hook_reduction(CommHook hook) {
  return std::make_unique<HookReduction>(std::move(hook));
}

at::Tensor result_of(BucketReduction::InFlight in_flight, const Bucket& bucket) {
  if (!in_flight.future) return bucket.gradients();
  const auto result = tensor_of(in_flight.future->value());
  const auto& expected = bucket.gradients();
  TORCH_CHECK(
      result.defined() && result.numel() == expected.numel() &&
          result.scalar_type() == expected.scalar_type() && result.device() == expected.device() &&
          result.layout() == expected.layout(),
      "expected the communication hook to return ", describe_result(expected), ", got ",
      describe_result(result));
  return bucket.is_sparse() ? result : result.resolve_conj().contiguous().view(-1);
}

}  // namespace ddp
