#include "tensors/tensor_file.h"

#include <string_view>

#include "tensors/safetensors_file.h"
#include "tensors/torch_tensors.h"

namespace ddp {
namespace {

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

}  // namespace

Box whole_box(const std::vector<int64_t>& sizes) {
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
