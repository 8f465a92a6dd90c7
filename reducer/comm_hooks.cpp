#include <ddp/comm_hooks.h>

#include <ATen/core/jit_type.h>
#include <ATen/ops/view_as_real.h>

namespace ddp::hooks {
namespace {

ProcessGroup group_or_default(const ProcessGroup& group) { return group ? group : default_group(); }

// Backends sum real numbers; a sum of complex numbers is the sum of their parts.
at::Tensor as_real(const at::Tensor& t) { return t.is_complex() ? at::view_as_real(t) : t; }

// The future of `finish()` once the all-reduce of `wire` is done.
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

CommHook compress_to(at::ScalarType dtype, const ProcessGroup& group) {
  return [dtype, group = group_or_default(group)](GradBucket& bucket) {
    const at::Tensor buffer = bucket.buffer();
    // Half of a complex number would be its real part: those travel as they are.
    const auto wire_dtype = buffer.is_complex() ? buffer.scalar_type() : dtype;
    const at::Tensor wire = buffer.to(wire_dtype).div_(group->getSize());
    return all_reduce_then(group, wire, [buffer, wire] {
      buffer.copy_(wire);
      return buffer;
    });
  };
}

}  // namespace

CommHook all_reduce(const ProcessGroup& group) {
  return [group = group_or_default(group)](GradBucket& bucket) {
    const at::Tensor buffer = bucket.buffer();
    buffer.div_(group->getSize());
    return all_reduce_then(group, buffer, [buffer] { return buffer; });
  };
}

CommHook fp16_compress(const ProcessGroup& group) { return compress_to(at::kHalf, group); }

CommHook bf16_compress(const ProcessGroup& group) { return compress_to(at::kBFloat16, group); }

}  // namespace ddp::hooks
