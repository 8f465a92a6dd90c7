#include "collectives/wire.h"

#include <algorithm>
#include <cstdint>

#include <ddp/internal/as_real.h>
#include <ddp/internal/capabilities.h>

namespace ddp {
namespace {

// Whether both Gloo and NCCL support the dtype.
bool is_sent_as_is(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

// Also writes the values to memory, because conj() and imag() may be lazy.
at::Tensor contiguous(const at::Tensor& tensor) {
  // The usual tensor goes as it is: the calls below take a tenth of a small collective's time.
  const bool is_lazy = tensor.is_conj() || tensor.is_neg();
  if (!tensor.requires_grad() && !is_lazy && tensor.is_contiguous()) return tensor;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  const auto begin = [](const at::Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr());
  };
  return begin(one) < begin(other) + other.nbytes() && begin(other) < begin(one) + one.nbytes();
}

// Returns the bytes of a contiguous tensor, sharing its memory.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); }

}  // namespace

void Wire::copy_back() const {
  if (!is_copy()) return;
  auto to = tensor.detach();
  auto from = wire;
  if (from.scalar_type() != to.scalar_type()) from = from.reshape({-1}).view(to.scalar_type());
  to.copy_(from.view(to.sizes()));
}

Wire wire_of(const at::Tensor& tensor) {
  const auto plain = contiguous(tensor);
  return {tensor, is_sent_as_is(plain.scalar_type()) ? plain : as_bytes(plain)};
}

Wire apart_from(const std::vector<Wire>& outputs, Wire input, bool in_place) {
  const auto is_shared = [&](const Wire& output) { return share_memory(input.wire, output.wire); };
  if (!in_place && std::any_of(outputs.begin(), outputs.end(), is_shared)) {
    input.wire = input.wire.clone();
  }
  return input;
}

bool begin_alike(const at::Tensor& one, const at::Tensor& other) {
  return one.const_data_ptr() == other.const_data_ptr();
}

Wire message_wire_of(const at::Tensor& tensor, c10d::ProcessGroup& group) {
  const bool takes_all = capabilities_of(group, tensor.device()).falls_back_to_gloo;
  return takes_all ? Wire{tensor, contiguous(tensor)} : wire_of(tensor);
}

std::vector<Wire> wires_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Wire> wires;
  for (const auto& tensor : tensors) wires.push_back(wire_of(tensor));
  return wires;
}

std::vector<at::Tensor> wire_tensors(const std::vector<Wire>& wires) {
  std::vector<at::Tensor> tensors;
  for (const auto& wire : wires) tensors.push_back(wire.wire);
  return tensors;
}

std::vector<at::Tensor> caller_tensors(const std::vector<Wire>& wires) {
  std::vector<at::Tensor> tensors;
  for (const auto& wire : wires) tensors.push_back(wire.tensor);
  return tensors;
}

Wire reduction_wire_of(const at::Tensor& tensor, const WireReduction& reduction) {
  const auto plain = contiguous(tensor);
  if (plain.is_complex()) return {tensor, as_real(plain)};
  if (plain.scalar_type() == reduction.dtype) return {tensor, plain};
  return {tensor, plain.view(reduction.dtype)};
}

StartedCall copying_out(
    StartedCall call, std::vector<Wire> outputs, const std::vector<Wire>& inputs, int divisor) {
  auto copies = std::move(call.buffers);
  for (const auto& output : outputs) {
    if (output.is_copy()) copies.push_back(output.wire);
  }
  for (const auto& input : inputs) {
    // The backends of the CPU keep what they send.
    if (!input.wire.is_cpu() && input.is_copy()) copies.push_back(input.wire);
  }
  if (call.parts.size() == 1 && copies.empty() && divisor == 1) return call;
  call.buffers = std::move(copies);
  call.outputs = caller_tensors(outputs);
  call.finish = [before = std::move(call.finish), outputs = std::move(outputs), divisor] {
    if (before) before();
    for (const auto& output : outputs) {
      if (divisor != 1) at::Tensor(output.wire).div_(divisor);
      output.copy_back();
    }
  };
  return call;
}

}  // namespace ddp
