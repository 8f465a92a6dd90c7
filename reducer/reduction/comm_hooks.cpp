#include <ddp/comm_hooks.h>

#include <ATen/core/jit_type.h>
#include <ddp/internal/as_real.h>
#include <ddp/internal/check.h>

#include "reduction/bucket_reduction.h"

namespace ddp::hooks {
namespace {

/// The group that hooks get() in each call, as one without a group of its own follows the default
/// group to another one.
const GroupArg& checked(const GroupArg& group) {
  (void)group.given();
  return group;
}

// Starts an all-reduce of `wire`; the future holds the result of `finish()`, called after it.
template <typename Finish>
c10::intrusive_ptr<c10::ivalue::Future> all_reduce_then(
    const ProcessGroup& group, const at::Tensor& wire, Finish finish) {
  std::vector<at::Tensor> tensors{as_real(wire)};
  return group->allreduce(tensors)->getFuture()->then(
      [finish = std::move(finish)](c10::ivalue::Future& done) {
        if (done.hasError()) std::rethrow_exception(done.exception_ptr());
        return c10::IValue(finish());
      },
      c10::TensorType::get());
}

CommHook compress_to(at::ScalarType dtype, const GroupArg& group) {
  return [dtype, given = checked(group)](GradBucket& bucket) {
    return all_reduce_in(dtype, bucket, given.get());
  };
}

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

FuturePtr completed(const at::Tensor& tensor) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::TensorType::get(),
      tensor.is_cpu() ? std::vector<c10::Device>{} : std::vector<c10::Device>{tensor.device()});
  future->markCompleted(tensor);
  return future;
}

GradBucket in_dtype(const GradBucket& bucket, at::ScalarType dtype) {
  const auto& buffer = bucket.buffer();
  const auto low = buffer.to(dtype);
  std::vector<at::Tensor> gradients;
  for (const auto& gradient : bucket.gradients()) {
    const auto offset = gradient.storage_offset() - buffer.storage_offset();
    gradients.push_back(low.as_strided(gradient.sizes(), gradient.strides(), offset));
  }
  return {bucket.index(), bucket.is_last(), low, std::move(gradients), bucket.parameters()};
}

CommHook compress_around(const char* name, at::ScalarType dtype, CommHook hook) {
  DDP_CHECK_VALUE(hook, name, ": expected a hook, got an empty function. Name one.");
  return [dtype, hook = std::move(hook)](GradBucket& bucket) -> FuturePtr {
    const at::Tensor& buffer = bucket.buffer();
    if (buffer.is_sparse() || buffer.is_complex()) return hook(bucket);
    auto low = in_dtype(bucket, dtype);
    return hook(low)->then(
        [buffer](c10::ivalue::Future& done) {
          if (done.hasError()) std::rethrow_exception(done.exception_ptr());
          const auto value = done.value();
          buffer.copy_(value.isTensor() ? value.toTensor() : value.toTensorVector().at(0));
          return c10::IValue(buffer);
        },
        c10::TensorType::get());
  };
}

}  // namespace

CommHook all_reduce(const GroupArg& group) {
  return [given = checked(group)](GradBucket& bucket) {
    const auto group = given.get();
    const at::Tensor& buffer = bucket.buffer();
    buffer.div_(group->getSize());
    return all_reduce_then(group, buffer, [buffer] { return buffer; });
  };
}

CommHook fp16_compress(const GroupArg& group) { return compress_to(at::kHalf, group); }

CommHook bf16_compress(const GroupArg& group) { return compress_to(at::kBFloat16, group); }

CommHook fp16_compress_wrapper(CommHook hook) {
  return compress_around("fp16_compress_wrapper", at::kHalf, std::move(hook));
}

CommHook bf16_compress_wrapper(CommHook hook) {
  return compress_around("bf16_compress_wrapper", at::kBFloat16, std::move(hook));
}

CommHook noop() {
  return [](GradBucket& bucket) { return completed(bucket.buffer()); };
}

}  // namespace ddp::hooks

namespace ddp {

c10::intrusive_ptr<c10::ivalue::Future> all_reduce_in(
    at::ScalarType dtype, GradBucket& bucket, const ProcessGroup& group,
    const std::optional<double>& scale) {
  const at::Tensor& buffer = bucket.buffer();
  // A cast to a real half type would keep only the real part. The CPU adds up no sparse tensors
  // of float16, and a cast would keep the indices, which are most of what they send, as they are.
  const bool casts = !buffer.is_complex() && !buffer.is_sparse();
  const at::Tensor wire = buffer.to(casts ? dtype : buffer.scalar_type());
  scale ? wire.mul_(*scale) : wire.div_(group->getSize());
  return hooks::all_reduce_then(group, wire, [buffer, wire] {
    buffer.copy_(wire);
    return buffer;
  });
}

}  // namespace ddp
