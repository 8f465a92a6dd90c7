#include "sharded/archive_dtypes.h"

#include <optional>
#include <string>

#include <ATen/ATen.h>

namespace ddp {
namespace {

/// The archive's dtype where it has the tensor in another one.
std::optional<at::ScalarType> other_dtype(
    torch::serialize::InputArchive& archive, const std::string& name, const at::Tensor& tensor,
    bool is_buffer) {
  at::Tensor saved;
  if (!tensor.defined() || !archive.try_read(name, saved, is_buffer)) return std::nullopt;
  if (saved.scalar_type() == tensor.scalar_type()) return std::nullopt;
  return saved.scalar_type();
}

}  // namespace

void ArchiveDtypes::take(torch::nn::Module& module, torch::serialize::InputArchive& archive) {
  const auto take_all = [&](const torch::OrderedDict<std::string, at::Tensor>& tensors,
                            bool are_buffers) {
    for (const auto& item : tensors) {
      auto tensor = item.value();
      const auto dtype = other_dtype(archive, item.key(), tensor, are_buffers);
      if (!dtype) continue;
      before_.emplace_back(tensor, tensor.detach());
      tensor.set_data(at::empty({0}, tensor.options().dtype(*dtype)));
    }
  };
  take_all(module.named_parameters(/*recurse=*/false), /*are_buffers=*/false);
  take_all(module.named_buffers(/*recurse=*/false), /*are_buffers=*/true);
  for (const auto& child : module.named_children()) {
    torch::serialize::InputArchive of_child;
    if (archive.try_read(child.key(), of_child)) take(*child.value(), of_child);
  }
}

void ArchiveDtypes::finish() {
  for (auto& [tensor, before] : before_) {
    if (tensor.scalar_type() == before.scalar_type()) continue;  // written back meanwhile
    tensor.set_data(tensor.to(before.scalar_type()));
  }
  before_.clear();
}

ArchiveDtypes::~ArchiveDtypes() {
  for (auto& [tensor, before] : before_) tensor.set_data(before);
}

}  // namespace ddp
