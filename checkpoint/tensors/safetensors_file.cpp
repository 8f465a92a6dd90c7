#include "tensors/safetensors_file.h"

#include <algorithm>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ddp/internal/check.h>
#include <ddp/safetensors.h>

#include "tensors/write_tensors.h"

namespace ddp {
namespace {

constexpr size_t kMaxIndexBytes = size_t{1} << 30;

SafetensorsHeader read_header(const InputFile& file, const std::string& path) {
  std::string bytes(std::min<uint64_t>(file.size(), kSafetensorsLengthBytes), '\0');
  file.read(0, bytes.data(), bytes.size());
  const auto length = safetensors_header_bytes(bytes, file.size(), path);
  const auto begun = bytes.size();
  bytes.resize(length);
  file.read(begun, bytes.data() + begun, length - begun);
  return read_safetensors_header(bytes, file.size(), path);
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path)
    : file_(path), header_(read_header(file_, path)) {}

at::Tensor SafetensorsFile::read(size_t i, const TensorBox& box) {
  const auto& kind = header_.tensors[i].kind;
  auto tensor = at::empty(box.size, kind.dtype);
  if (tensor.numel() == 0) return tensor;
  const auto begin = header_.begins[i];
  auto* to = static_cast<char*>(tensor.mutable_data_ptr());
  const auto item = c10::elementSize(kind.dtype);
  for (const auto& run : runs_of(box, whole_box(kind.sizes))) {
    const auto bytes = static_cast<size_t>(run.count) * item;
    file_.read(begin + static_cast<size_t>(run.first) * item, to, bytes);
    to += bytes;
  }
  // A byte that is neither 0 nor 1 is no bool of C++.
  return kind.dtype == at::kBool ? tensor.view(at::kByte).ne(0) : tensor;
}

SafetensorsFiles::SafetensorsFiles(const std::string& index) {
  const auto folder = folder_above(index);
  std::unordered_map<const SafetensorsFile*, std::unordered_map<std::string, size_t>> places;
  for (const auto& [name, file] :
       read_safetensors_index(read_whole_file(index, kMaxIndexBytes), index)) {
    auto& opened = files_[file];
    if (!opened) {
      opened = std::make_unique<SafetensorsFile>(folder + "/" + file);
      for (size_t i = 0; i < opened->tensors().size(); ++i) {
        places[opened.get()][opened->tensors()[i].name] = i;
      }
    }
    const auto& in_file = places[opened.get()];
    const auto found = in_file.find(name);
    DDP_CHECK(
        found != in_file.end(), index, ": expected \"", name, "\" in ", file,
        ", as weight_map has it, got none. Copy the files of one model.");
    tensors_.push_back(opened->tensors()[found->second]);
    places_.push_back({opened.get(), found->second});
  }
}

at::Tensor SafetensorsFiles::read(size_t i, const TensorBox& box) {
  return places_[i].file->read(places_[i].i, box);
}

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
