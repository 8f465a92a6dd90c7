#include "parts/cut_parts.h"

#include <unordered_map>
#include <unordered_set>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "python/module_dict.h"
#include "python/torch_file.h"
#include "shards/box.h"
#include "shards/shard_reader.h"

namespace ddp::detail {
namespace {

constexpr const char* kState = "state";
// A parameter has one of each, however it is cut: its steps, and NAdam's product.
constexpr const char* kNumbers[] = {"step", "mu_product"};
constexpr const char* kGroups = "param_groups";
constexpr const char* kParams = "params";

bool is_number(const c10::IValue& field) {
  return any_of(kNumbers, [&](const char* name) { return field == name; });
}

void add_shards(
    const std::string& name, const ParameterLayout& layout, const at::Tensor& tensor,
    std::vector<ShardedTensor>& shards) {
  const auto views = views_of_boxes(layout, tensor);
  for (size_t i = 0; i < views.size(); ++i) {
    shards.push_back({name, layout.sizes, layout.boxes[i].offset, views[i], 0, layout.stage});
  }
}

/// `own` with this rank's elements of `whole`; what is padding stays.
at::Tensor with_elements_of(
    const at::Tensor& whole, const ParameterLayout& layout, at::Tensor own) {
  const c10::NoGradGuard no_grad;
  const auto views = views_of_boxes(layout, own);
  for (size_t i = 0; i < views.size(); ++i) views[i].copy_(box_view(whole, layout.boxes[i]));
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

using Layouts = std::vector<ParameterLayout>;

bool are_of_stage(const Layouts& layouts) {
  return any_of(layouts, [](const ParameterLayout& layout) { return layout.stage.has_value(); });
}

/// The numbers of an optimizer's parameters, by group.
std::vector<c10::IValue> groups_of(const torch::optim::Optimizer& optimizer) {
  std::vector<c10::IValue> groups;
  int64_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    auto numbers = make_list();
    for (size_t i = 0; i < group.params().size(); ++i) numbers.push_back(number++);
    groups.emplace_back(numbers);
  }
  return groups;
}

/// "blocks.3.fc.weight" of "exp_avg/blocks.3.fc.weight".
std::string parameter_in(const std::string& name) { return name.substr(name.find('/') + 1); }

/// The name of the parameter whose state it is; "" where no field is among the shards.
std::string name_in(const c10::IValue& fields) {
  if (!fields.isGenericDict()) return "";
  for (const auto& [field, value] : entries_of(fields)) {
    if (value.isString()) return parameter_in(value.toStringRef());
  }
  return "";
}

/// Returns the fields of the parameters' state by the parameters' names: all fields that are among
/// the shards, and the steps of their parameters.
std::unordered_map<std::string, std::vector<std::pair<std::string, c10::IValue>>> fields_by_name(
    const c10::IValue& saved, const ShardIndex& index) {
  std::unordered_map<std::string, std::vector<std::pair<std::string, c10::IValue>>> fields;
  for (const auto& tensor : index) {
    const auto& name = tensor.first;
    fields[parameter_in(name)].emplace_back(name.substr(0, name.find('/')), name);
  }
  for (const auto& [number, of_number] : entries_of(*find_in(saved, kState))) {
    const auto name = name_in(of_number);
    if (name.empty()) continue;
    for (const char* key : kNumbers) {
      const auto* number_of_it = find_in(of_number, key);
      if (number_of_it != nullptr && number_of_it->isTensor())
        fields[name].emplace_back(key, *number_of_it);
    }
  }
  return fields;
}

c10::IValue with_state(const c10::IValue& optimizer, const c10::IValue& state) {
  auto all = make_dict();
  for (const auto& [key, value] : entries_of(optimizer)) {
    all.insert(key, key == kState ? state : value);
  }
  return all;
}

/// Converts the state of an optimizer with other parameters to the state of one with the parameters
/// of `layouts`, which it finds by their names. Groups keep their order.
c10::IValue with_names_of(
    const c10::IValue& saved, const Layouts& layouts, const std::vector<c10::IValue>& groups,
    const ShardReader& reader) {
  const auto fields = fields_by_name(saved, reader.index());
  auto state = make_dict();
  for (size_t i = 0; i < layouts.size(); ++i) {
    const auto found = fields.find(layouts[i].name);
    if (found == fields.end()) continue;  // without a gradient so far
    auto own = make_dict();
    for (const auto& [field, value] : found->second) own.insert(field, value);
    state.insert(static_cast<int64_t>(i), own);
  }
  auto options = make_list();
  const auto* saved_groups = find_in(saved, kGroups);
  for (size_t g = 0; saved_groups != nullptr && g < saved_groups->toListRef().size(); ++g) {
    auto group = make_dict();
    for (const auto& [key, value] : entries_of(saved_groups->toListRef()[g])) {
      group.insert(key, key == kParams && g < groups.size() ? groups[g] : value);
    }
    options.push_back(group);
  }
  return make_dict({{kState, state}, {kGroups, options}});
}

/// Puts the parameters' state, which a file has by number, to the numbers that the program gives to
/// the parameters of the same names. A parameter that has another name in the file, where modules
/// share it, has its number there.
c10::IValue in_order_of(
    const c10::IValue& saved, const Layouts& layouts, const LoadContext& context) {
  std::unordered_map<std::string, size_t> numbers;
  for (size_t i = 0; i < layouts.size(); ++i) numbers.emplace(layouts[i].name, i);
  auto state = make_dict();
  std::vector<std::pair<c10::IValue, c10::IValue>> without_name;
  for (const auto& [number, fields] : entries_of(*find_in(saved, kState))) {
    const auto found = numbers.find(name_in(fields));
    if (found == numbers.end()) {
      without_name.emplace_back(number, fields);
    } else {
      state.insert(static_cast<int64_t>(found->second), fields);
    }
  }
  for (const auto& [number, fields] : without_name) {
    DDP_CHECK_VALUE(
        !state.contains(number), context.subject,
        ": expected the state of the program's parameters, got that of ", name_in(fields),
        ", which it does not have. Make the optimizer with the parameters that it was saved with.");
    state.insert(number, fields);
  }
  return with_state(saved, state);
}

/// In the order in which an optimizer's dictionary numbers the parameters.
Layouts layouts_of_optimizer(
    const torch::optim::Optimizer& optimizer, const LayoutsByParameter& known) {
  std::unordered_set<std::string> names;
  Layouts layouts;
  for (const auto& group : optimizer.param_groups()) {
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

c10::IValue cut_whole(
    const c10::IValue& saved, const Layouts& layouts, const LoadContext& context) {
  DDP_CHECK_VALUE(
      !are_of_stage(layouts), context.subject,
      ": expected an optimizer's state by name for the parameters of a pipeline's stage, got one "
      "by number, of a whole model. Save it from a pipeline, which may have one stage.");
  return replace_in_state(
      saved, [&](size_t index, const c10::IValue& field, const c10::IValue& value) -> c10::IValue {
        if (index >= layouts.size() || is_number(field) || !value.isTensor()) return value;
        const auto& layout = layouts[index];
        const auto whole = value.toTensor();
        check_sizes(whole.sizes() == layout.sizes, context, field, layout, ddp::str(whole.sizes()));
        const auto zeros = at::zeros(layout.local.sizes(), whole.scalar_type());
        return with_elements_of(whole, layout, zeros);
      });
}

/// Puts this rank's elements in the places of names.
c10::IValue read_shards(
    const c10::IValue& saved, const Layouts& layouts, const LoadContext& context) {
  auto& reader = *context.shards;
  const auto filled = replace_in_state(
      saved, [&](size_t index, const c10::IValue& field, const c10::IValue& value) -> c10::IValue {
        if (!value.isString() || index >= layouts.size()) return value;
        const auto& layout = layouts[index];
        const auto found = reader.index().find(value.toStringRef());
        const bool is_there = found != reader.index().end();
        if (is_there && is_number(field)) {
          const auto step = at::zeros({}, found->second.kind.dtype);
          reader.add(found->second, TensorBox{}, step);
          return step;
        }
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
  return filled;
}

}  // namespace

bool has_state(const c10::IValue& optimizer) {
  const auto* state = find_in(optimizer, kState);
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
  return with_state(optimizer, state);
}

std::string names_of_parameters(
    const torch::optim::Optimizer& optimizer, const LayoutsByParameter& layouts) {
  std::string names;
  for (const auto& layout : layouts_of_optimizer(optimizer, layouts)) names += layout.name + "\n";
  return names;
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
  const auto state = named_state(*module());
  const auto tensors = tensors_of_module(*module());
  // Both by the names in a file: Python's wrapper saves them with a prefix.
  std::unordered_map<std::string, std::pair<const ModuleTensor*, std::string>> by_name;
  for (const auto& tensor : tensors) {
    for (size_t i = 0; i < tensor.names.size(); ++i) {
      const std::pair place{&tensor, state[tensor.places[i]].name};
      by_name.emplace(tensor.names[i], place);
      by_name.emplace("module." + tensor.names[i], place);
    }
  }
  const bool is_stage =
      any_of(tensors, [](const auto& tensor) { return tensor.layout.stage.has_value(); });
  auto own = make_dict();
  for (const auto& [name, value] : entries_of(saved)) {
    const auto found = name.isString() ? by_name.find(name.toStringRef()) : by_name.end();
    if (found == by_name.end() || !value.isTensor()) {
      const bool is_of_other_stage = is_stage && name.isString() && context.is_elsewhere &&
                                     context.is_elsewhere(name.toStringRef());
      if (!is_of_other_stage) own.insert(name, value);
      continue;
    }
    const auto& layout = found->second.first->layout;
    const auto whole = value.toTensor();
    DDP_CHECK_VALUE(
        whole.sizes() == layout.sizes, context.subject,
        ": expected the model's shapes and dtypes, but \"", layout.name, "\" is ",
        at::IntArrayRef(layout.sizes), " in the model and ", whole.sizes(),
        " in the file. Build the model as it was saved.");
    const auto local = layout.local.detach().to(
        at::kCPU, whole.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    own.insert(found->second.second, with_elements_of(whole, layout, local));
  }
  return whole_->prepare(own, context);
}

CutOptimizerPart::CutOptimizerPart(
    CheckpointPartPtr whole, std::function<LayoutsByParameter()> layouts)
    : whole_(std::move(whole)), layouts_(std::move(layouts)) {}

bool CutOptimizerPart::goes_by_name(const Layouts& layouts) const {
  return !is_alike_ || are_of_stage(layouts);
}

std::vector<ParameterLayout> CutOptimizerPart::layouts_in_order() const {
  return layouts_of_optimizer(*whole_->optimizer(), layouts_());
}

void CutOptimizerPart::gather(const ProcessGroup& group, States /*states*/) {
  whole_->gather(group, States::OfAll);
  is_gathered_ = true;
}

// Not a part of gather(): an error there would not reach the other ranks.
std::vector<ShardedTensor> CutOptimizerPart::take_shards() {
  std::vector<ShardedTensor> shards;
  if (!std::exchange(is_gathered_, false)) return shards;
  const auto layouts = layouts_in_order();
  const bool by_name = goes_by_name(layouts);
  state_ = replace_in_state(
      whole_->state(),
      [&](size_t index, const c10::IValue& field, const c10::IValue& value) -> c10::IValue {
        const auto& layout = layouts.at(index);
        if (!value.isTensor() || (is_number(field) && !by_name)) return value;
        const auto name = ddp::str(field.toStringRef(), "/", layout.name);
        if (is_number(field)) {
          shards.push_back({name, {}, {}, value.toTensor(), 0, layout.stage});
        } else {
          add_shards(name, layout, value.toTensor(), shards);
        }
        return name;
      });
  // The file has the numbers of one rank's parameters.
  if (by_name) state_.toGenericDict().insert(kByName, true);
  return shards;
}

c10::IValue CutOptimizerPart::state() { return std::exchange(state_, {}); }

PreparedLoad CutOptimizerPart::prepare(const c10::IValue& saved, const LoadContext& context) {
  if (!has_state(saved)) return whole_->prepare(saved, context);
  const auto layouts = layouts_in_order();
  if (context.shards == nullptr) {
    return whole_->prepare(cut_whole(saved, layouts, context), context);
  }
  const bool is_by_name = goes_by_name(layouts) || find_in(saved, kByName) != nullptr;
  const auto own =
      is_by_name ? with_names_of(saved, layouts, groups_of(*whole_->optimizer()), *context.shards)
                 : in_order_of(saved, layouts, context);
  return whole_->prepare(read_shards(own, layouts, context), context);
}

}  // namespace ddp::detail
