#include "deferred/out_arguments.h"

#include <algorithm>

#include <ATen/ATen.h>

namespace ddp {

std::vector<OutArgument> out_arguments(const c10::FunctionSchema& schema) {
  std::vector<OutArgument> found;
  for (size_t k = 0; k < schema.returns().size(); ++k) {
    const auto* result = schema.returns()[k].alias_info();
    if (result == nullptr || !result->isWrite()) continue;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& argument = schema.arguments()[i];
      const auto* alias = argument.alias_info();
      if (argument.kwarg_only() && argument.type()->kind() == c10::TypeKind::TensorType &&
          alias != nullptr && alias->beforeSets() == result->beforeSets()) {
        found.push_back({k, i});
      }
    }
  }
  return found;
}

void resize_deferred(
    const at::Tensor& tensor, const at::Tensor& like, const c10::Storage& standin) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), tensor.storage_offset());
  const auto bytes = at::detail::computeStorageNbytes(
      like.sizes(), like.strides(), like.itemsize(), static_cast<size_t>(tensor.storage_offset()));
  for (auto* storage : {tensor.storage().unsafeGetStorageImpl(), standin.unsafeGetStorageImpl()}) {
    storage->set_nbytes(std::max(storage->nbytes(), bytes));
  }
}

}  // namespace ddp
