#include "parts/cut_parts.h"

#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/text.h>

#include "parts/module_tensors.h"
#include "python/module_dict.h"
#include "python/torch_file.h"
#include "shards/box.h"
#include "shards/shard_reader.h"

namespace ddp::detail {
namespace {

constexpr const char* kState = "state";
constexpr const char* kStep = "step";

void add_shards(
    const std::string& name, const ParameterLayout& layout, const at::Tensor& tensor,
    std::vector<ShardedTensor>& shards) {
  const auto views = views_of_boxes(layout, tensor);
  for (size_t i = 0; i < views.size(); ++i) {
    shards.push_back({name, layout.sizes, layout.boxes[i].offset, views[i]});
  }
}

/// `own` with this rank's elements of `whole`; what is padding stays.
at::Tensor with_elements_of(
    const at::Tensor& whole, const ParameterLayout& layout, at::Tensor own) {
  const c10::NoGradGuard no_grad;
  const auto views = views_of_boxes(layout, own);
  const std::vector<int64_t> origin(layout.sizes.size(), 0);
  for (size_t i = 0; i < views.size(); ++i) {
    views[i].copy_(box_view(whole, origin, layout.boxes[i]));
  }
  return own;
}

void check_sizes(
    bool fit, const LoadContext& context, const c10::IValue& field, const ParameterLayout& layout,
    const std::string& got) {
  DDP_CHECK_VALUE(
      fit, context.subject, ": expected ", field, " of ", layout.name, " of sizes ",
      at::IntArrayRef(layout.sizes), ", got ", got,
      ". Make the optimizer with the parameters that it was saved with.");
}

std::vector<std::pair<c10::IValue, c10::IValue>> entries_of(const c10::IValue& dict) {
  std::vector<std::pair<c10::IValue, c10::IValue>> entries;
  for (const auto& entry : dict.toGenericDict()) entries.emplace_back(entry.key(), entry.value());
  return entries;
}

}  // namespace

bool has_state(const c10::IValue& optimizer) {
  const auto* state = optimizer.isGenericDict() ? find_in(optimizer, kState) : nullptr;
  return state != nullptr && state->isGenericDict();
}

c10::IValue replace_in_state(const c10::IValue& optimizer, const ReplaceField& replace) {
  auto state = make_dict();
  for (const auto& [index, fields] : entries_of(*find_in(optimizer, kState))) {
    if (!index.isInt() || !fields.isGenericDict()) {
      state.insert(index, fields);
      continue;
    }
    auto replaced = make_dict();
    for (const auto& [field, value] : entries_of(fields)) {
      replaced.insert(field, replace(static_cast<size_t>(index.toInt()), field, value));
    }
    state.insert(index, replaced);
  }
  auto all = make_dict();
  for (const auto& [key, value] : entries_of(optimizer)) {
    all.insert(key, key == kState ? c10::IValue(state) : value);
  }
  return all;
}

void add_layouts_of(const torch::nn::Module& module, LayoutsByParameter& layouts) {
  for (auto& layout : layouts_of(module)) {
    const auto* key = layout.local.unsafeGetTensorImpl();
    layouts.emplace(key, std::move(layout));
  }
}

std::vector<ShardedTensor> shards_of_module(const torch::nn::Module& module) {
  std::vector<ShardedTensor> shards;
  for (const auto& tensor : tensors_of_module(module)) {
    add_shards(tensor.names[0], tensor.layout, tensor.value, shards);
  }
  return shards;
}

std::map<std::string, std::vector<std::string>> other_names_in(const torch::nn::Module& module) {
  std::map<std::string, std::vector<std::string>> others;
  for (const auto& [names, places, tensor, value, layout] : tensors_of_module(module)) {
    if (names.size() > 1) others[names[0]] = {names.begin() + 1, names.end()};
  }
  return others;
}

PreparedLoad CutModelPart::prepare(const c10::IValue& saved, const LoadContext& context) {
  if (!saved.isGenericDict()) return whole_->prepare(saved, context);
  LayoutsByParameter layouts;
  add_layouts_of(*module(), layouts);
  std::unordered_map<std::string, const ParameterLayout*> by_name;
  for (const auto& named : named_state(*module())) {
    const auto found = layouts.find(named.tensor.unsafeGetTensorImpl());
    if (found == layouts.end()) continue;
    by_name.emplace(named.name, &found->second);
    by_name.emplace("module." + named.name, &found->second);  // as Python's wrapper saves it
  }
  auto own = make_dict();
  for (const auto& [name, value] : entries_of(saved)) {
    const auto found = name.isString() ? by_name.find(name.toStringRef()) : by_name.end();
    if (found == by_name.end() || !value.isTensor()) {
      own.insert(name, value);
      continue;
    }
    const auto& layout = *found->second;
    const auto whole = value.toTensor();
    DDP_CHECK_VALUE(
        whole.sizes() == layout.sizes, context.subject,
        ": expected the model's shapes and dtypes, but \"", layout.name, "\" is ",
        at::IntArrayRef(layout.sizes), " in the model and ", whole.sizes(),
        " in the file. Build the model as it was saved.");
    const auto local = layout.local.detach().to(
        at::kCPU, whole.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    own.insert(name, with_elements_of(whole, layout, local));
  }
  return whole_->prepare(own, context);
}

CutOptimizerPart::CutOptimizerPart(
    CheckpointPartPtr whole, std::function<LayoutsByParameter()> layouts)
    : whole_(std::move(whole)), layouts_(std::move(layouts)) {}

// In the order in which an optimizer's dictionary numbers the parameters.
std::vector<ParameterLayout> CutOptimizerPart::layouts_in_order() const {
  const auto known = layouts_();
  std::unordered_set<std::string> names;
  std::vector<ParameterLayout> layouts;
  for (const auto& group : whole_->optimizer()->param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto found = known.find(parameter.unsafeGetTensorImpl());
      const auto number = std::to_string(layouts.size());
      auto layout = found == known.end() ? whole_layout(number, parameter) : found->second;
      // Two models may have parameters of the same name.
      if (!names.insert(layout.name).second) layout.name += "/" + number;
      layouts.push_back(std::move(layout));
    }
  }
  return layouts;
}

void CutOptimizerPart::gather(const ProcessGroup& group, States /*states*/) {
  whole_->gather(group, States::OfAll);
  is_gathered_ = true;
}

// Apart from gather(), because the other ranks are not told of an error there.
std::vector<ShardedTensor> CutOptimizerPart::take_shards() {
  std::vector<ShardedTensor> shards;
  if (!std::exchange(is_gathered_, false)) return shards;
  const auto layouts = layouts_in_order();
  state_ = replace_in_state(
      whole_->state(),
      [&](size_t index, const c10::IValue& field, const c10::IValue& value) -> c10::IValue {
        if (!value.isTensor() || field == kStep) return value;
        const auto& layout = layouts.at(index);
        const auto name = ddp::str(field.toStringRef(), "/", layout.name);
        add_shards(name, layout, value.toTensor(), shards);
        return name;
      });
  return shards;
}

c10::IValue CutOptimizerPart::state() { return std::exchange(state_, {}); }

PreparedLoad CutOptimizerPart::prepare(const c10::IValue& saved, const LoadContext& context) {
  if (!has_state(saved)) return whole_->prepare(saved, context);
  const auto layouts = layouts_in_order();
  if (context.shards == nullptr) {
    const auto own = replace_in_state(
        saved,
        [&](size_t index, const c10::IValue& field, const c10::IValue& value) -> c10::IValue {
          if (index >= layouts.size() || field == kStep || !value.isTensor()) return value;
          const auto& layout = layouts[index];
          const auto whole = value.toTensor();
          check_sizes(
              whole.sizes() == layout.sizes, context, field, layout, ddp::str(whole.sizes()));
          const auto zeros = at::zeros(layout.local.sizes(), whole.scalar_type());
          return with_elements_of(whole, layout, zeros);
        });
    return whole_->prepare(own, context);
  }
  auto& reader = *context.shards;
  const auto filled = replace_in_state(
      saved, [&](size_t index, const c10::IValue& field, const c10::IValue& value) -> c10::IValue {
        if (!value.isString() || index >= layouts.size()) return value;
        const auto& layout = layouts[index];
        const auto found = reader.index().find(value.toStringRef());
        const bool is_there = found != reader.index().end();
        check_sizes(
            is_there && found->second.kind.sizes == layout.sizes, context, field, layout,
            is_there ? kind_text(found->second.kind) : "none");
        // Zeros, since padding is in no box.
        const auto tensor = at::zeros(layout.local.sizes(), found->second.kind.dtype);
        const auto views = views_of_boxes(layout, tensor);
        for (size_t i = 0; i < views.size(); ++i) {
          reader.add(found->second, layout.boxes[i], views[i]);
        }
        return tensor;
      });
  reader.read();
  return whole_->prepare(filled, context);
}

}  // namespace ddp::detail
