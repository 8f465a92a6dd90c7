#include "saved_tensors/saved_tensor_hooks.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <ddp/internal/autograd_engine.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/side_stream.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace ddp {
namespace {

using Packs = std::vector<std::shared_ptr<const PackFunction>>;

/// The innermost last; null where none is to be called.
Packs& packs_of_this_thread() {
  static thread_local Packs packs;
  return packs;
}

class PackedVariable final : public torch::autograd::SavedVariableHooks {
 public:
  explicit PackedVariable(std::shared_ptr<const PackFunction> pack) : pack_(std::move(pack)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const c10::NoGradGuard no_grad;
    const WithoutSavedTensorHooks no_hooks;
    unpack_ = (*pack_)(tensor);
    pack_.reset();
  }
  at::Tensor call_unpack_hook() override {
    const c10::NoGradGuard no_grad;
    const WithoutSavedTensorHooks no_hooks;
    return unpack_();
  }

 private:
  std::shared_ptr<const PackFunction> pack_;
  UnpackFunction unpack_;
};

std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() {
  const auto& packs = packs_of_this_thread();
  if (packs.empty() || packs.back() == nullptr) return nullptr;
  return std::make_unique<PackedVariable>(packs.back());
}

/// Where the tensor has gaps or overlaps, contiguous.
at::Tensor memory_like(const at::Tensor& tensor, const at::TensorOptions& options) {
  return tensor.is_non_overlapping_and_dense()
             ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
             : at::empty(tensor.sizes(), options);
}

/// The version that a tensor has when an operation saves it. Keeps no memory of it.
struct SavedVersion {
  c10::VariableVersion counter;
  uint32_t version;

  /// \param same  has the tensor's sizes.
  void check(const at::Tensor& same) const {
    DDP_CHECK(
        counter.current_version() == version,
        "save_on_host: expected a tensor as it was when an operation saved it, got [",
        joined_by(", ", same.sizes()),
        "] that has been modified by an inplace operation since. Pass a clone() to one of them.");
  }
};

SavedVersion version_of(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return {counter, counter.current_version()};
}

// A stream of copies has the next ones queued while one runs; each more keeps a tensor's memory.
constexpr size_t kMostCopying = 4;

}  // namespace

SavedTensorHooks::SavedTensorHooks(PackFunction pack) {
  DDP_CHECK(
      set_saved_hooks(&make_hooks),
      "save_on_host: expected LibTorch's own autograd engine, got another library's: Python is in "
      "this process. Use torch.autograd.graph.save_on_cpu there.");
  packs_of_this_thread().push_back(std::make_shared<const PackFunction>(std::move(pack)));
}

SavedTensorHooks::~SavedTensorHooks() { packs_of_this_thread().pop_back(); }

WithoutSavedTensorHooks::WithoutSavedTensorHooks() { packs_of_this_thread().push_back(nullptr); }

WithoutSavedTensorHooks::~WithoutSavedTensorHooks() { packs_of_this_thread().pop_back(); }

UnpackFunction keep_as_it_is(const at::Tensor& tensor) {
  return [tensor = tensor.detach(), version = version_of(tensor)] {
    version.check(tensor);
    return tensor;
  };
}

bool can_be_replaced(const at::Tensor& tensor) {
  // Linear saves its weight as a view.
  const auto& base = tensor.is_view() ? tensor._base() : tensor;
  return tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         !(base.is_leaf() && base.requires_grad());
}

struct CopiesToHost::HostCopy {
  at::Tensor values;  // on the host
  c10::Device device;
  std::optional<c10::Event> arrived;
};

CopiesToHost::~CopiesToHost() {
  for (const auto& one : copying_) one.tensor.record_stream(one.by);
}

void CopiesToHost::begin_copy(const at::Tensor& tensor, const std::shared_ptr<HostCopy>& copy) {
  record_use(tensor);
  const auto from = current_stream_of(copy->device);
  const auto by = side_stream_after_current(copy->device, SideStream::Downloads);
  const c10::StreamGuard guard(by);
  copy->values.copy_(tensor, /*non_blocking=*/true);
  copy->arrived.emplace(copy->device.type());
  copy->arrived->record(by);
  copying_.push_back({tensor.detach(), copy, from, by});
  if (copying_.size() <= kMostCopying) return;
  // From then on its memory is the saving stream's again.
  copying_.front().copy->arrived->block(copying_.front().from);
  copying_.pop_front();
}

UnpackFunction CopiesToHost::add(const at::Tensor& tensor) {
  const auto device = tensor.device();
  const bool is_accelerator = !device.is_cpu();
  auto copy = std::make_shared<HostCopy>(HostCopy{
      memory_like(tensor, tensor.options().device(at::kCPU).pinned_memory(is_accelerator)), device,
      std::nullopt});
  if (is_accelerator) {
    begin_copy(tensor, copy);
  } else {
    copy->values.copy_(tensor);
  }
  return [copy, saved = version_of(tensor)] {
    // A copy on a side stream may have read what was written after the operation.
    saved.check(copy->values);
    if (copy->arrived) copy->arrived->block(current_stream_of(copy->device));
    auto back =
        memory_like(copy->values, copy->values.options().device(copy->device).pinned_memory(false));
    back.copy_(copy->values, /*non_blocking=*/copy->arrived.has_value());
    return back;
  };
}

}  // namespace ddp
