#include "tensors/torch_tensors.h"

#include <ddp/internal/check.h>

namespace ddp {

TorchTensors::TorchTensors(const std::string& path) : file_(path) {
  const auto& dict = file_.contents();
  DDP_CHECK_VALUE(
      dict.isGenericDict(), path,
      ": expected a state_dict() of a module, names with their tensors, got ", dict.tagKind(),
      ". Save model.state_dict().");
  for (const auto& entry : dict.toGenericDict()) {
    DDP_CHECK_VALUE(
        entry.key().isString() && entry.value().isTensor(), path,
        ": expected a state_dict() of a module, names with their tensors, got ",
        entry.value().tagKind(), " under ", entry.key(), ". Save model.state_dict() alone.");
    const auto& tensor = entry.value().toTensor();
    tensors_.push_back({entry.key().toStringRef(), {tensor.scalar_type(), tensor.sizes().vec()}});
  }
}

at::Tensor TorchTensors::read(size_t i, const Box& box) {
  const auto& [name, kind] = tensors_[i];
  return file_.read(name, kind.dtype, whole_box(kind.sizes), box);
}

}  // namespace ddp
