#include <ddp/internal/module_tensors.h>

#include <optional>
#include <utility>

#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/stage_tensors.h>

#include "python/module_dict.h"

namespace ddp {
namespace {

using CountByTensor = std::unordered_map<const void*, int>;

const void* key_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

/// Lists the names of a model's tensors in the order of named_state(), without the prefixes of
/// wrappers in between.
///
/// A layout names its parameter in the whole model, and a module below a wrapper has the parameter
/// under another prefix. The difference of the two names is the prefix of the module's buffers.
class GlobalNames {
 public:
  GlobalNames(const LayoutsByParameter& layouts, const std::vector<NamedTensor>& state)
      : layouts_(layouts) {
    for (const auto& named : state) ++count_[key_of(named.tensor)];
  }

  std::vector<std::string> of(const torch::nn::Module& module) {
    visit(module, "");
    return std::move(names_);
  }

 private:
  void visit(const torch::nn::Module& module, const std::string& registered) {
    const auto prefix = prefix_by_layouts(module).value_or(registered);
    const auto add = [&](const auto& items) {
      for (const auto& item : items) {
        if (item.value().defined()) names_.push_back(prefix + item.key());
      }
    };
    add(module.named_parameters(/*recurse=*/false));
    add(module.named_buffers(/*recurse=*/false));
    const auto* sharded = dynamic_cast<const ShardedModule*>(&module);
    const bool is_wrapper = sharded != nullptr && sharded->is_transparent();
    for (const auto& child : module.named_children()) {
      visit(*child.value(), is_wrapper ? prefix : prefix + child.key() + ".");
    }
  }

  std::optional<std::string> prefix_by_layouts(const torch::nn::Module& module) const {
    for (const auto& item : module.named_parameters()) {
      // The layout of a shared parameter has the name of another module's.
      const auto* key = item.value().defined() ? key_of(item.value()) : nullptr;
      const auto found = layouts_.find(key);
      if (found == layouts_.end() || count_.at(key) > 1) continue;
      const auto& whole = found->second.name;
      const auto& own = item.key();
      if (whole == own) return "";
      const auto end = "." + own;
      if (whole.size() > end.size() && whole.substr(whole.size() - end.size()) == end) {
        return whole.substr(0, whole.size() - own.size());
      }
    }
    return std::nullopt;
  }

  const LayoutsByParameter& layouts_;
  CountByTensor count_;
  std::vector<std::string> names_;
};

/// \param value  that a save writes.
ParameterLayout buffer_layout(
    const std::string& name, const at::Tensor& buffer, const at::Tensor& value) {
  auto layout = whole_layout(name, buffer);
  add_stage_to(layout);
  layout.local = value;
  return layout;
}

}  // namespace

void add_layouts_of(const torch::nn::Module& module, LayoutsByParameter& layouts) {
  for (auto& layout : layouts_of(module)) {
    const auto* key = key_of(layout.local);
    layouts.emplace(key, std::move(layout));
  }
}

std::vector<ModuleTensor> tensors_of_module(const torch::nn::Module& module) {
  LayoutsByParameter layouts;
  add_layouts_of(module, layouts);
  const auto state = named_state(module);
  const auto values = values_to_save(module, state);
  const auto names = GlobalNames(layouts, state).of(state_root(module));
  std::vector<ModuleTensor> tensors;
  std::unordered_map<const void*, size_t> known;
  for (size_t i = 0; i < state.size(); ++i) {
    const auto* key = key_of(state[i].tensor);
    const auto [number, is_new] = known.emplace(key, tensors.size());
    if (is_new) {
      const auto found = layouts.find(key);
      auto layout = found == layouts.end() ? buffer_layout(names[i], state[i].tensor, values[i])
                                           : found->second;
      tensors.push_back({{layout.name}, {i}, state[i].tensor, values[i], std::move(layout)});
    }
    auto& tensor = tensors[number->second];
    if (names[i] == tensor.names[0]) continue;
    tensor.names.push_back(names[i]);
    tensor.places.push_back(i);
  }
  return tensors;
}

}  // namespace ddp
