#include "tensors/tensor_file.h"

#include <string_view>

#include "python/module_dict.h"
#include "shards/shard_file.h"
#include "tensors/safetensors_file.h"

namespace ddp {
namespace {

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

/// A file of torch.save with a state_dict(): names with their tensors.
class TorchTensors : public TensorFile {
 public:
  explicit TorchTensors(const std::string& path) : file_(path) {
    for (const auto& [name, tensor] : tensors_in(file_.contents(), path)) {
      tensors_.push_back({name, {tensor.scalar_type(), tensor.sizes().vec()}});
    }
  }

  const std::vector<NamedKind>& tensors() const override { return tensors_; }

  at::Tensor read(size_t i, const TensorBox& box) override {
    const auto& [name, kind] = tensors_[i];
    return file_.read(name, kind.dtype, whole_box(kind.sizes), box);
  }

 private:
  ShardFile file_;
  std::vector<NamedKind> tensors_;
};

}  // namespace

TensorBox whole_box(const std::vector<int64_t>& sizes) {
  return {std::vector<int64_t>(sizes.size(), 0), sizes};
}

bool is_safetensors(const std::string& path) { return ends_with(path, ".safetensors"); }
bool is_safetensors_index(const std::string& path) { return ends_with(path, ".json"); }

std::unique_ptr<TensorFile> open_tensor_file(const std::string& path) {
  if (is_safetensors(path)) return std::make_unique<SafetensorsFile>(path);
  if (is_safetensors_index(path)) return std::make_unique<SafetensorsFiles>(path);
  return std::make_unique<TorchTensors>(path);
}

}  // namespace ddp
