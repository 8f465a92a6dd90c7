#include "tensors/write_tensors.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ddp/internal/check.h>
#include <ddp/internal/file_io.h>

#include "python/torch_file.h"

namespace ddp {

TensorSource source_of(
    const torch::OrderedDict<std::string, at::Tensor>& dict, const std::string& path) {
  TensorSource source;
  std::unordered_map<const void*, size_t> first;
  for (const auto& item : dict) {
    const auto& tensor = item.value();
    const bool is_dense = tensor.defined() && tensor.layout() == at::kStrided &&
                          !tensor.is_quantized() && !tensor.is_meta();
    DDP_CHECK_VALUE(
        is_dense, path, ": expected dense tensors, got ",
        !tensor.defined() ? "an undefined" : "another", " one under \"", item.key(),
        "\". Save what it is made from.");
    const auto number = source.tensors.size();
    source.tensors.push_back({item.key(), {tensor.scalar_type(), tensor.sizes().vec()}});
    source.same_as.push_back(first.emplace(tensor.unsafeGetTensorImpl(), number).first->second);
  }
  source.read = [&dict](size_t i) {
    return dict.items()[i].value().detach().resolve_conj().resolve_neg().cpu().contiguous();
  };
  return source;
}

void write_safetensors(
    const TensorSource& source, const Metadata& metadata, const std::string& path) {
  std::vector<size_t> order(source.tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return c10::elementSize(source.tensors[a].kind.dtype) >
           c10::elementSize(source.tensors[b].kind.dtype);
  });
  std::vector<NamedKind> ordered;
  for (const auto i : order) ordered.push_back(source.tensors[i]);
  const auto header = make_safetensors_header(ordered, metadata, path);
  replace_file(path, [&](OutputFile& file) {
    file.write(header.data(), header.size());
    for (const auto i : order) {
      const auto tensor = source.read(i);
      file.write(tensor.const_data_ptr(), tensor.nbytes());
    }
  });
}

void write_torch_tensors(const TensorSource& source, const std::string& path) {
  LazyTensors lazy;
  auto dict = make_dict();
  std::vector<at::Tensor> placeholders;
  for (size_t i = 0; i < source.tensors.size(); ++i) {
    const auto first = source.same_as.empty() ? i : source.same_as[i];
    placeholders.push_back(
        first < i ? placeholders[first]
                  : lazy.add(source.tensors[i].kind, [&source, i] { return source.read(i); }));
    dict.insert(source.tensors[i].name, placeholders.back());
  }
  replace_torch_file(
      path, [&] { return c10::IValue(dict); }, &lazy);
}

}  // namespace ddp
