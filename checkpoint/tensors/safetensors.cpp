#include <ddp/safetensors.h>

#include "tensors/safetensors_file.h"
#include "tensors/write_tensors.h"

namespace ddp {

void save_safetensors(
    const torch::OrderedDict<std::string, at::Tensor>& dict, const std::string& file,
    const std::map<std::string, std::string>& metadata) {
  write_safetensors(source_of(dict, file), metadata, file);
}

torch::OrderedDict<std::string, at::Tensor> load_safetensors(const std::string& file_or_index) {
  std::unique_ptr<TensorFile> file;
  if (is_safetensors_index(file_or_index)) {
    file = std::make_unique<SafetensorsFiles>(file_or_index);
  } else {
    file = std::make_unique<SafetensorsFile>(file_or_index);
  }
  torch::OrderedDict<std::string, at::Tensor> dict;
  for (size_t i = 0; i < file->tensors().size(); ++i) {
    dict.insert(file->tensors()[i].name, file->read(i));
  }
  return dict;
}

std::map<std::string, std::string> safetensors_metadata(const std::string& file) {
  return SafetensorsFile(file).metadata();
}

}  // namespace ddp
