#include "python/optimizer_dict.h"

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/internal/check.h>
#include <ddp/internal/optimizer_kinds.h>
#include <ddp/internal/text.h>

#include "python/torch_file.h"

namespace ddp {
namespace {

// Calls `use` with the kind of the optimizer; returns false for a class that Python's file has not.
template <typename Use>
bool with_python_kind(const torch::optim::Optimizer& optimizer, Use use) {
  bool is_known = false;
  with_kind(optimizer, [&](auto kind) {
    if constexpr (decltype(kind)::kStepsEachParameter) {
      use(kind);
      is_known = true;
    }
  });
  return is_known;
}

class FieldWriter {
 public:
  explicit FieldWriter(const c10::impl::GenericDict& dict) : dict_(dict) {}

  void number(const char* name, double value) { dict_.insert(name, value); }
  void flag(const char* name, bool value) { dict_.insert(name, value); }
  void fixed(const char* name, bool value) { dict_.insert(name, value); }
  void choice(const char* name) { dict_.insert(name, c10::IValue()); }
  void pair(const char* name, const std::tuple<double, double>& value) {
    dict_.insert(name, c10::ivalue::Tuple::create({std::get<0>(value), std::get<1>(value)}));
  }
  void triple(const char* name, const std::tuple<double, double, double>& value) {
    const auto [a, b, c] = value;
    dict_.insert(name, c10::ivalue::Tuple::create({a, b, c}));
  }
  void count(const char* name, int64_t value) { dict_.insert(name, value); }
  void text(const char* name, const std::optional<std::string>& value) {
    dict_.insert(name, value ? c10::IValue(*value) : c10::IValue());
  }
  void dtype(const char* name, at::ScalarType value) {
    if (value != at::kBFloat16) dict_.insert(name, c10::toString(value));
  }
  void scalar(const char* name, double value) {
    dict_.insert(name, at::scalar_tensor(value, at::kFloat));
  }
  // Python counts in float, which holds integers up to 2^24.
  void step(const char* name, int64_t value) {
    const bool is_exact = static_cast<int64_t>(static_cast<float>(value)) == value;
    dict_.insert(name, at::scalar_tensor(value, is_exact ? at::kFloat : at::kDouble));
  }
  void tensor(const char* name, const at::Tensor& value, bool /*required*/) {
    if (value.defined()) dict_.insert(name, value.detach());
  }

 private:
  c10::impl::GenericDict dict_;
};

class FieldReader {
 public:
  FieldReader(const c10::IValue& dict, std::string subject)
      : dict_(dict), subject_(std::move(subject)) {}

  void number(const char* name, double& value) { value = to_number(name, required(name)); }
  void flag(const char* name, bool& value) {
    const auto& saved = required(name);
    check(saved.isBool(), name, "true or false", saved);
    value = saved.toBool();
  }
  void fixed(const char* name, bool value) {
    const auto* saved = find_in(dict_, name);
    if (saved == nullptr || saved->isNone()) return;
    check(
        saved->isBool() && saved->toBool() == value, name,
        ddp::str(value ? "true" : "false", ", as LibTorch's optimizer does it"), *saved);
  }
  void choice(const char* /*name*/) {}
  void pair(const char* name, std::tuple<double, double>& value) {
    const auto& saved = required(name);
    std::vector<c10::IValue> both;
    if (saved.isTuple()) both = saved.toTupleRef().elements().vec();
    if (saved.isList()) both = saved.toListRef().vec();
    check(both.size() == 2, name, "two numbers", saved);
    value = {to_number(name, both[0]), to_number(name, both[1])};
  }
  void triple(const char* name, std::tuple<double, double, double>& value) {
    const auto& saved = required(name);
    std::vector<c10::IValue> all;
    if (saved.isTuple()) all = saved.toTupleRef().elements().vec();
    if (saved.isList()) all = saved.toListRef().vec();
    check(all.size() == 3, name, "three numbers", saved);
    value = {to_number(name, all[0]), to_number(name, all[1]), to_number(name, all[2])};
  }
  void count(const char* name, int64_t& value) {
    value = std::llround(to_number(name, required(name)));
  }
  void text(const char* name, std::optional<std::string>& value) {
    const auto& saved = required(name);
    check(saved.isNone() || saved.isString(), name, "a text or None", saved);
    value = saved.toOptional<std::string>();
  }
  void dtype(const char* name, at::ScalarType& value) {
    const auto* saved = find_in(dict_, name);
    value = at::kBFloat16;
    if (saved == nullptr || saved->isNone()) return;
    for (const auto type : {at::kBFloat16, at::kFloat, at::kDouble}) {
      if (!saved->isString() || saved->toStringRef() != c10::toString(type)) continue;
      value = type;
      return;
    }
    check(false, name, "\"BFloat16\", \"Float\" or \"Double\"", *saved);
  }
  void scalar(const char* name, double& value) { value = to_number(name, required(name)); }
  void step(const char* name, int64_t& value) {
    value = std::llround(to_number(name, required(name)));
  }
  void tensor(const char* name, at::Tensor& value, bool is_required) {
    const auto* saved = is_required ? &required(name) : find_in(dict_, name);
    if (saved == nullptr || saved->isNone()) return;
    check(saved->isTensor(), name, "a tensor", *saved);
    check(
        saved->toTensor().sizes() == parameter_.sizes(), name,
        ddp::str("the shape ", parameter_.sizes(), " of its parameter"), saved->toTensor().sizes());
    // As in Python, a state tensor gets the device and the dtype of its parameter.
    value = saved->toTensor().to(parameter_.device(), parameter_.scalar_type());
  }

  void set_parameter(const at::Tensor& parameter) { parameter_ = parameter; }

 private:
  template <typename Got>
  void check(bool condition, const char* name, const std::string& rule, const Got& got) const {
    if (condition) return;
    if constexpr (std::is_same_v<Got, c10::IValue>) {
      if (got.isTensor()) check(false, name, rule, ddp::str("a tensor ", got.toTensor().sizes()));
      // Do not print containers: they may have many elements.
      if (got.isTuple() || got.isList() || got.isGenericDict()) {
        check(false, name, rule, ddp::str("a ", got.tagKind()));
      }
    }
    DDP_CHECK_VALUE(
        false, subject_, ": expected \"", name, "\" to be ", rule, ", got ", got,
        ". Make the optimizer as the one that was saved.");
  }

  const c10::IValue& required(const char* name) const {
    const auto* saved = find_in(dict_, name);
    DDP_CHECK_VALUE(
        saved != nullptr, subject_, ": expected \"", name,
        "\", got a dictionary without. Make the optimizer as the one that was saved.");
    return *saved;
  }

  double to_number(const char* name, const c10::IValue& saved) const {
    if (saved.isTensor() && saved.toTensor().numel() == 1) return saved.toTensor().item<double>();
    if (saved.isInt()) return static_cast<double>(saved.toInt());
    check(saved.isDouble(), name, "a number", saved);
    return saved.toDouble();
  }

  const c10::IValue dict_;
  const std::string subject_;
  at::Tensor parameter_;
};

template <typename Kind>
c10::IValue write_optimizer(torch::optim::Optimizer& optimizer) {
  sync_step_counts(optimizer);
  auto state = make_dict();
  auto groups = make_list();
  int64_t index = 0;
  for (auto& group : optimizer.param_groups()) {
    auto options = make_dict();
    FieldWriter writer(options);
    auto& own = static_cast<typename Kind::Options&>(group.options());
    visit_options(writer, own);
    auto indices = make_list();
    for (const auto& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) {
        auto fields = make_dict();
        FieldWriter state_writer(fields);
        visit_state(state_writer, static_cast<typename Kind::State&>(*found->second), own);
        state.insert(index, fields);
      }
      indices.push_back(index++);
    }
    options.insert("params", indices);
    groups.push_back(options);
  }
  return make_dict({{"state", state}, {"param_groups", groups}});
}

struct SavedOptimizer {
  c10::IValue state;
  std::vector<c10::IValue> groups;
  std::vector<std::vector<c10::IValue>> indices;  // by group
};

SavedOptimizer split_dict(const c10::IValue& saved, const std::string& subject) {
  const char* const rule =
      ": expected an optimizer's state_dict(), with \"state\" and \"param_groups\", got ";
  const char* const remedy = ". Save optimizer.state_dict().";
  DDP_CHECK_VALUE(saved.isGenericDict(), subject, rule, saved.tagKind(), remedy);
  const auto* state = find_in(saved, "state");
  const auto* groups = find_in(saved, "param_groups");
  DDP_CHECK_VALUE(
      state != nullptr && state->isGenericDict() && groups != nullptr && groups->isList(), subject,
      rule, "another dictionary", remedy);
  SavedOptimizer parts{*state, groups->toListRef().vec(), {}};
  for (const auto& group : parts.groups) {
    const auto* indices = find_in(group, "params");
    DDP_CHECK_VALUE(
        indices != nullptr && indices->isList(), subject, rule, "a group without \"params\"",
        remedy);
    parts.indices.push_back(indices->toListRef().vec());
  }
  return parts;
}

void check_groups(
    const SavedOptimizer& saved, const std::vector<torch::optim::OptimizerParamGroup>& own,
    const std::string& subject) {
  const char* const remedy = ". Make the optimizer with the parameters that it was saved with.";
  DDP_CHECK_VALUE(
      saved.groups.size() == own.size(), subject, ": expected the optimizer's ", own.size(),
      " groups of parameters, got ", saved.groups.size(), remedy);
  for (size_t g = 0; g < own.size(); ++g) {
    DDP_CHECK_VALUE(
        saved.indices[g].size() == own[g].params().size(), subject, ": expected the ",
        own[g].params().size(), " parameters of group ", g, ", got ", saved.indices[g].size(),
        remedy);
  }
}

using ParamStates =
    std::vector<std::pair<at::Tensor, std::shared_ptr<torch::optim::OptimizerParamState>>>;

// Returns nothing where the saved run had no state: a parameter without a gradient so far, SGD
// without momentum.
template <typename Kind>
std::shared_ptr<torch::optim::OptimizerParamState> read_state(
    const c10::IValue* fields, const at::Tensor& parameter, const typename Kind::Options& options,
    const std::string& subject) {
  constexpr bool is_made_with_optimizer =
      std::is_same_v<typename Kind::Optimizer, torch::optim::Adagrad>;
  if (fields == nullptr && !is_made_with_optimizer) return nullptr;
  DDP_CHECK_VALUE(
      fields != nullptr && fields->isGenericDict(), subject, ": expected its state, got ",
      fields == nullptr ? "none" : fields->tagKind(), ". Save optimizer.state_dict().");
  if constexpr (std::is_same_v<typename Kind::Optimizer, torch::optim::SGD>) {
    if (options.momentum() == 0) return nullptr;
  }
  auto state = std::make_shared<typename Kind::State>();
  FieldReader reader(*fields, subject);
  reader.set_parameter(parameter);
  visit_state(reader, *state, options);
  return state;
}

template <typename Kind>
PreparedLoad read_optimizer(
    torch::optim::Optimizer& optimizer, const c10::IValue& saved, const std::string& subject) {
  const auto parts = split_dict(saved, subject);
  auto& groups = optimizer.param_groups();
  check_groups(parts, groups, subject);

  std::vector<std::shared_ptr<torch::optim::OptimizerOptions>> options;
  ParamStates states;
  for (size_t g = 0; g < groups.size(); ++g) {
    options.push_back(groups[g].options().clone());
    auto& own = static_cast<typename Kind::Options&>(*options.back());
    FieldReader reader(parts.groups[g], ddp::str(subject, ", group ", g));
    visit_options(reader, own);
    for (size_t p = 0; p < parts.indices[g].size(); ++p) {
      const auto& parameter = groups[g].params()[p];
      auto state = read_state<Kind>(
          find_in(parts.state, parts.indices[g][p]), parameter, own,
          ddp::str(subject, ", parameter ", p, " of group ", g));
      if (state) states.emplace_back(parameter, std::move(state));
    }
  }

  return {[&optimizer, options = std::move(options), states = std::move(states)] {
    auto& own = optimizer.param_groups();
    for (size_t g = 0; g < own.size(); ++g) own[g].set_options(options[g]->clone());
    optimizer.state().clear();
    for (const auto& [parameter, state] : states) {
      optimizer.state()[parameter.unsafeGetTensorImpl()] = state->clone();
    }
    reset_step_counts(optimizer);
  }};
}

}  // namespace

bool is_known_optimizer(const torch::optim::Optimizer& optimizer) {
  return with_python_kind(optimizer, [](auto /*kind*/) {});
}

c10::IValue optimizer_dict(torch::optim::Optimizer& optimizer) {
  c10::IValue dict;
  with_python_kind(
      optimizer, [&](auto kind) { dict = write_optimizer<decltype(kind)>(optimizer); });
  return dict;
}

PreparedLoad prepare_optimizer(
    torch::optim::Optimizer& optimizer, const c10::IValue& saved, const std::string& subject) {
  PreparedLoad load;
  with_python_kind(optimizer, [&](auto kind) {
    load =
        read_optimizer<decltype(kind)>(optimizer, saved, ddp::str(subject, " (", kind.name, ")"));
  });
  return load;
}

}  // namespace ddp
