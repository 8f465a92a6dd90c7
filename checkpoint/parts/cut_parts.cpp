#include "parts/cut_parts.h"

#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <ddp/internal/check.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/text.h>

#include "parts/module_tensors.h"
#include "python/torch_file.h"
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

std::vector<ShardedTensor> shards_of_module(const torch::nn::Module& module) {
  std::vector<ShardedTensor> shards;
  for (const auto& tensor : tensors_of_module(module)) {
    add_shards(tensor.names[0], tensor.layout, tensor.value, shards);
  }
  return shards;
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
    for (const auto& layout : layouts) {
      DDP_CHECK_VALUE(
          !is_in_parts(layout) && layout.local.sizes() == layout.sizes, context.subject,
          ": expected shards of the state of ", layout.name,
          ", which is cut over the ranks, got a file without. Load it where its layers are whole, "
          "and save it there.");
    }
    return whole_->prepare(saved, context);
  }
  auto& reader = *context.shards;
  const auto filled = replace_in_state(
      saved, [&](size_t index, const c10::IValue& field, const c10::IValue& value) -> c10::IValue {
        if (!value.isString() || index >= layouts.size()) return value;
        const auto& layout = layouts[index];
        const auto found = reader.index().find(value.toStringRef());
        DDP_CHECK_VALUE(
            found != reader.index().end() && found->second.kind.sizes == layout.sizes,
            context.subject, ": expected ", field, " of ", layout.name, " of sizes ",
            at::IntArrayRef(layout.sizes), ", got ",
            found == reader.index().end() ? "none" : kind_text(found->second.kind),
            ". Make the optimizer with the parameters that it was saved with.");
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
