#include "elastic/flat_state.h"

#include <cstring>
#include <utility>

#include <ATen/ATen.h>
#include <ddp/internal/check.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/map_leaves.h>
#include <ddp/internal/text.h>
#include <torch/csrc/jit/serialization/pickle.h>

namespace ddp::elastic {
namespace {

constexpr int64_t kUndefined = -1;

/// The state with `map(tensor)` for each of its tensors that is defined.
template <typename Map>
c10::IValue map_tensors(const c10::IValue& state, const Map& map) {
  return map_leaves(state, [&](const c10::IValue& leaf) -> c10::IValue {
    if (leaf.isTensor()) return leaf.toTensor().defined() ? map(leaf.toTensor()) : leaf;
    DDP_CHECK_VALUE(
        leaf.isNone() || leaf.isBool() || leaf.isInt() || leaf.isDouble() || leaf.isString(),
        "Elastic: expected a state of tensors, numbers, strings, lists and dictionaries, got ",
        leaf.tagKind(), ".");
    return leaf;
  });
}

/// \param tensors  receives the value's, which the text has by their numbers.
std::string pickled(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  const auto bytes = torch::jit::pickle(value, &tensors);
  return {bytes.begin(), bytes.end()};
}

c10::IValue unpickled(const std::string& text, const std::vector<at::Tensor>& tensors) {
  return torch::jit::unpickle(
      text.data(), text.size(), torch::jit::TypeResolver(/*no types*/ nullptr), tensors);
}

}  // namespace

// The pickler writes what has several owners in another way: each tensor gets an object of its own.
FlatState flatten(const c10::IValue& state) {
  FlatState flat;
  std::vector<at::Tensor> all;
  const auto structure =
      pickled(map_tensors(state, [](const at::Tensor& t) { return t.detach(); }), all);
  std::vector<int64_t> kinds;  // of each tensor its dtype, number of sizes, and sizes
  for (auto& tensor : all) {
    kinds.push_back(tensor.defined() ? static_cast<int64_t>(tensor.scalar_type()) : kUndefined);
    if (!tensor.defined()) continue;
    kinds.push_back(tensor.dim());
    kinds.insert(kinds.end(), tensor.sizes().begin(), tensor.sizes().end());
    flat.tensors.push_back(std::move(tensor));
  }
  std::vector<at::Tensor> none;
  flat.text = packed({structure, pickled(kinds, none)});
  return flat;
}

c10::IValue unflatten(const std::string& text, std::vector<at::Tensor>& tensors) {
  const auto texts = unpacked(text);
  const auto kinds = unpickled(texts.at(1), {}).toIntVector();
  std::vector<at::Tensor> all;
  for (auto kind = kinds.begin(); kind != kinds.end();) {
    auto& tensor = all.emplace_back();
    const auto dtype = *kind++;
    if (dtype == kUndefined) continue;
    TORCH_INTERNAL_ASSERT(dtype >= 0 && dtype < static_cast<int64_t>(at::ScalarType::NumOptions));
    TORCH_INTERNAL_ASSERT(kind != kinds.end() && *kind >= 0 && *kind < kinds.end() - kind);
    const auto dim = *kind++;
    tensor = at::empty(std::vector<int64_t>(kind, kind + dim), static_cast<at::ScalarType>(dtype));
    kind += dim;
    tensors.push_back(tensor);
  }
  return unpickled(texts.at(0), all);
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.detach().cpu().contiguous().flatten().view(at::kByte);
}

std::string packed_state(const c10::IValue& state) {
  const auto flat = flatten(state);
  std::vector<std::string> texts{flat.text};
  for (const auto& tensor : flat.tensors) {
    const auto bytes = bytes_of(tensor);
    texts.emplace_back(
        reinterpret_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel()));
  }
  return packed(texts);
}

c10::IValue unpacked_state(const std::string& text) {
  const auto texts = unpacked(text);
  std::vector<at::Tensor> tensors;
  auto state = unflatten(texts.at(0), tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& bytes = texts.at(i + 1);
    TORCH_INTERNAL_ASSERT(bytes.size() == tensors[i].nbytes());
    if (!bytes.empty()) std::memcpy(tensors[i].mutable_data_ptr(), bytes.data(), bytes.size());
  }
  return state;
}

c10::IValue copied(const c10::IValue& state) {
  return map_tensors(state, [](const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), tensor.scalar_type()).copy_(tensor.detach());
  });
}

uint64_t hash_of(const c10::IValue& state) {
  const auto flat = flatten(state);
  auto hash = fnv1a(flat.text);
  for (const auto& tensor : flat.tensors) {
    const auto bytes = bytes_of(tensor);
    hash = mixed(hash, hash_of_bytes(bytes.const_data_ptr(), static_cast<size_t>(bytes.numel())));
  }
  return hash;
}

}  // namespace ddp::elastic
