#include <ddp/internal/tensor_broadcast.h>

#include <cstring>
#include <map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/utils/tensor_flatten.h>

namespace ddp {

constexpr size_t kMessageBytes = size_t{25} << 20;

void overwrite_unversioned(const at::Tensor& tensor, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  tensor.variable_data().copy_(value);
}

void overwrite(const at::Tensor& tensor, const at::Tensor& value) {
  overwrite_unversioned(tensor, value);
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

bool have_equal_bytes(const at::Tensor& a, const at::Tensor& b) {
  const auto x = a.detach().resolve_conj().resolve_neg().contiguous();
  const auto y = b.detach().resolve_conj().resolve_neg().contiguous();
  return x.nbytes() == y.nbytes() &&
         (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

void TensorBroadcast::start(
    const std::vector<at::Tensor>& tensors, int source, c10d::ProcessGroup& group) {
  messages_.clear();
  receives_ = group.getRank() != source;
  if (tensors.empty() || group.getSize() == 1) return;
  const at::NoGradGuard no_grad;
  // A message has one device and one dtype; take_tensors() separates the dtypes.
  std::map<c10::DeviceIndex, std::vector<at::Tensor>> by_device;
  for (const auto& t : tensors) by_device[t.device().index()].push_back(t);
  for (const auto& [device, here] : by_device) {
    for (auto& part : torch::utils::take_tensors(here, kMessageBytes)) {
      auto flat = at::flatten_dense_tensors(part.tensors);
      const bool is_in_place = flat.is_alias_of(part.tensors.front());
      if (is_in_place && receives_ && arrival_ == Arrival::InCopy) flat = at::empty_like(flat);
      std::vector<at::Tensor> wire{flat.view(at::kByte)};  // a backend may lack the dtype
      c10d::BroadcastOptions options;
      options.rootRank = source;
      auto work = group.broadcast(wire, options);
      messages_.push_back({std::move(part.tensors), std::move(flat), std::move(work)});
    }
  }
}

void TensorBroadcast::finish(c10::function_ref<void(c10d::Work&)> wait, Write write) {
  const at::NoGradGuard no_grad;
  for (auto& message : std::exchange(messages_, {})) {
    wait(*message.work);
    if (!receives_) continue;
    const auto received = at::unflatten_dense_tensors(message.flat, message.tensors);
    for (size_t i = 0; i < received.size(); ++i) write(message.tensors[i], received[i]);
  }
}

}  // namespace ddp
