#include "python/module_dict.h"

#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "python/torch_file.h"

namespace ddp {
namespace {

constexpr const char* kWrapperPrefix = "module.";

void collect_state(
    const torch::nn::Module& module, const std::string& prefix, std::vector<NamedTensor>& found) {
  const auto add = [&](const auto& items) {
    for (const auto& item : items) {
      if (item.value().defined()) found.push_back({prefix + item.key(), item.value()});
    }
  };
  add(module.named_parameters(/*recurse=*/false));
  add(module.named_buffers(/*recurse=*/false));
  for (const auto& child : module.named_children()) {
    collect_state(*child.value(), prefix + child.key() + ".", found);
  }
}

// Returns the prefix of the saved names that the module's own names lack.
std::string saved_prefix(
    const std::vector<NamedTensor>& saved, const std::vector<NamedTensor>& own) {
  const auto all_have = [](const std::vector<NamedTensor>& tensors) {
    return all_of(
        tensors, [](const NamedTensor& named) { return named.name.rfind(kWrapperPrefix, 0) == 0; });
  };
  return all_have(saved) && !all_have(own) ? kWrapperPrefix : "";
}

/// Compares the saved names with the module's: the tensors of equal names, and the differences.
struct Comparison {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  std::vector<std::string> missing, additional;
  std::string unlike;  // differing shapes, and dtypes where they matter
};

Comparison compare(
    const std::vector<NamedTensor>& own, const std::vector<NamedTensor>& saved_tensors,
    const c10::IValue& saved, bool strict) {
  Comparison result;
  const auto prefix = saved_prefix(saved_tensors, own);
  std::unordered_set<std::string> known;
  for (const auto& [name, tensor] : own) {
    known.insert(prefix + name);
    const auto* found = find_in(saved, prefix + name);
    if (found == nullptr) {
      result.missing.push_back(name);
      continue;
    }
    const auto& from = found->toTensor();
    if (from.sizes() != tensor.sizes() || (strict && from.scalar_type() != tensor.scalar_type())) {
      result.unlike += ddp::str(
          result.unlike.empty() ? "" : "; ", '"', name, "\" is ", tensor.sizes(), " ",
          tensor.scalar_type(), " in the model and ", from.sizes(), " ", from.scalar_type(),
          " in the file");
    }
    result.copies.emplace_back(tensor, from);
  }
  for (const auto& named : saved_tensors) {
    if (!known.count(named.name)) result.additional.push_back(named.name);
  }
  return result;
}

}  // namespace

std::vector<NamedTensor> tensors_in(const c10::IValue& saved, const std::string& subject) {
  const char* const rule = ": expected a state_dict() of a module, names with their tensors, got ";
  DDP_CHECK_VALUE(
      saved.isGenericDict(), subject, rule, saved.tagKind(), ". Save model.state_dict().");
  std::vector<NamedTensor> tensors;
  for (const auto& entry : saved.toGenericDict()) {
    DDP_CHECK_VALUE(
        entry.key().isString() && entry.value().isTensor(), subject, rule, entry.value().tagKind(),
        " under ", entry.key(), ". Save model.state_dict() alone.");
    tensors.push_back({entry.key().toStringRef(), entry.value().toTensor()});
  }
  return tensors;
}

const torch::nn::Module& state_root(const torch::nn::Module& module) {
  const bool is_wrapper = dynamic_cast<const DistributedDataParallelBase*>(&module) != nullptr;
  return is_wrapper ? *module.children().front() : module;
}

std::vector<NamedTensor> named_state(const torch::nn::Module& module) {
  std::vector<NamedTensor> found;
  collect_state(state_root(module), "", found);
  return found;
}

std::vector<at::Tensor> values_to_save(
    const torch::nn::Module& module, const std::vector<NamedTensor>& state) {
  std::vector<at::Tensor> values;
  for (const auto& named : state) values.push_back(named.tensor);
  if (const auto* wrapper = dynamic_cast<const DistributedDataParallelBase*>(&module)) {
    values = wrapper->values_of(values);
  }
  // Values only: with requires_grad, a copy would belong to a graph.
  for (auto& value : values) value = value.detach();
  return values;
}

c10::IValue module_dict(const torch::nn::Module& module) {
  const auto state = named_state(module);
  const auto values = values_to_save(module, state);
  auto dict = make_dict();
  for (size_t i = 0; i < state.size(); ++i) dict.insert(state[i].name, values[i]);
  return dict;
}

PreparedLoad prepare_module(
    torch::nn::Module& module, const c10::IValue& saved, bool strict, const std::string& subject) {
  const auto own = named_state(module);
  auto result = compare(own, tensors_in(saved, subject), saved, strict);
  const auto names = lacking_names("the model", "the file", result.missing, result.additional);
  DDP_CHECK_VALUE(
      result.unlike.empty(), subject, ": expected the model's shapes and dtypes, but ",
      result.unlike, ". Build the model as it was saved.");
  DDP_CHECK_VALUE(
      !strict || names.empty(), subject, ": expected the model's names, but ", names,
      ". Build the model as it was saved, or load it with strict false.");
  PreparedLoad load;
  if (!names.empty()) load.notice = ddp::str(subject, ": ", names, ".");
  load.apply = [copies = std::move(result.copies)] {
    const c10::NoGradGuard no_grad;
    for (auto& [to, from] : copies) to.copy_(from);
  };
  return load;
}

}  // namespace ddp
