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
// Pinned memory for the elements of tensors of devices.
constexpr size_t kOnHostAtOnce = size_t{256} << 20;

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

/// Calls `use` with the bytes of each tensor, on the host.
template <typename Use>
void visit_on_host(const std::vector<at::Tensor>& tensors, const Use& use) {
  for (size_t begin = 0; begin < tensors.size();) {
    TensorsOnHost copies;
    std::vector<at::Tensor> on_host;
    size_t bytes = 0;
    for (size_t i = begin; i < tensors.size(); ++i) {
      const auto& tensor = tensors[i];
      bytes += tensor.is_cpu() ? 0 : tensor.nbytes();
      if (i > begin && bytes > kOnHostAtOnce) break;
      on_host.push_back(
          tensor.is_cpu() ? tensor : copies.copy(tensor, TensorsOnHost::Order::RowByRow));
    }
    copies.wait();
    for (const auto& tensor : on_host) use(bytes_of(tensor));
    begin += on_host.size();
  }
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
  return tensor.detach().contiguous().flatten().view(at::kByte);
}

std::string packed_state(const c10::IValue& state) {
  const auto flat = flatten(state);
  std::vector<std::string> texts{flat.text};
  visit_on_host(flat.tensors, [&](const at::Tensor& bytes) {
    texts.emplace_back(
        reinterpret_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel()));
  });
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
    return tensor.detach().clone(at::MemoryFormat::Contiguous);
  });
}

c10::IValue copied_to_host(const c10::IValue& state, TensorsOnHost& copies) {
  return map_tensors(state, [&](const at::Tensor& tensor) {
    return copies.copy(tensor, TensorsOnHost::Order::RowByRow);
  });
}

c10::IValue copied_to_device(const c10::IValue& state, c10::Device device, bool with_scalars) {
  const auto moves = [&](const at::Tensor& tensor) {
    return tensor.is_cpu() && (with_scalars || tensor.dim() > 0);
  };
  int64_t bytes = 0;
  map_tensors(state, [&](const at::Tensor& tensor) {
    if (moves(tensor)) bytes += static_cast<int64_t>(tensor.nbytes());
    return tensor;
  });
  TensorsToDevice copies(device, bytes);
  auto moved = map_tensors(state, [&](const at::Tensor& tensor) {
    return moves(tensor) ? copies.copy(tensor) : tensor;
  });
  copies.wait();
  return moved;
}

uint64_t hash_of(const c10::IValue& state) {
  const auto flat = flatten(state);
  auto hash = fnv1a(flat.text);
  visit_on_host(flat.tensors, [&](const at::Tensor& bytes) {
    hash = mixed(hash, hash_of_bytes(bytes.const_data_ptr(), static_cast<size_t>(bytes.numel())));
  });
  return hash;
}

}  // namespace ddp::elastic
