#include "replicas/optimizer_values.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <iterator>
#include <sstream>
#include <unordered_map>

#include <ddp/internal/optimizer_kinds.h>
#include <ddp/internal/text.h>
#include <torch/serialize/archive.h>

namespace ddp {
namespace {

namespace optim = torch::optim;

using Values = std::vector<OptimizerValue>;

// The values that `write` writes, sorted by key, so that the order is the same on every rank. Empty
// where the program's own class cannot be serialized.
Values serialized_values(const std::function<void(torch::serialize::OutputArchive&)>& write) {
  std::stringstream bytes;
  torch::serialize::OutputArchive out;
  try {
    write(out);
    out.save_to(bytes);
  } catch (const c10::Error&) {
    return {};
  }
  torch::serialize::InputArchive in;
  in.load_from(bytes);
  auto keys = in.keys();
  std::sort(keys.begin(), keys.end());
  Values values;
  for (const auto& key : keys) {
    c10::IValue value;
    if (in.try_read(key, value)) values.push_back({key, value});
  }
  return values;
}

/// Collects the values of a state.
struct ValueCollector {
  Values values;

  void step(const char* name, int64_t value) { values.push_back({name, value}); }
  void count(const char* name, int64_t value) { values.push_back({name, value}); }
  void number(const char* name, double value) { values.push_back({name, value}); }
  void tensor(const char* name, const at::Tensor& value, bool /*is_required*/) {
    values.push_back({name, value});
  }
  void tensors(const char* name, const std::deque<at::Tensor>& value) {
    values.push_back({name, std::vector<at::Tensor>(value.begin(), value.end())});
  }
};

// Reads LibTorch's own states directly: without a copy, and since LBFGS's cannot be serialized
// after a step.
Values values_of(optim::OptimizerParamState& state) {
  ValueCollector fields;
  const bool is_known = with_kind(state, [&](auto kind, auto& own) {
    visit_state(fields, own, typename decltype(kind)::Options(/*lr=*/1));
  });
  if (is_known) return std::move(fields.values);
  return serialized_values([&](auto& out) { state.serialize(out); });
}

Values values_of(const optim::OptimizerOptions& options) {
  auto values = serialized_values([&](auto& out) { options.serialize(out); });
  if (!values.empty()) return values;
  try {
    return {{"lr", options.get_lr()}};
  } catch (const c10::Error&) {
    return {};  // it has no learning rate
  }
}

void append(Values& values, Values more, const std::string& owner) {
  for (auto& value : more) {
    values.push_back({ddp::str(value.name, " of ", owner), std::move(value.value)});
  }
}

}  // namespace

Values optimizer_values(
    const optim::Optimizer& optimizer, const torch::nn::Module& module, const Names& ignored) {
  sync_step_counts(optimizer);
  std::unordered_map<const void*, std::string> names;
  for (const auto& item : module.named_parameters()) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  Values options, state;
  const auto& groups = optimizer.param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto group = ddp::str("parameter group ", g);
    append(options, values_of(groups[g].options()), group);
    const auto& parameters = groups[g].params();
    for (size_t p = 0; p < parameters.size(); ++p) {
      auto* const key = parameters[p].unsafeGetTensorImpl();
      const auto found = optimizer.state().find(key);
      if (found == optimizer.state().end()) continue;
      const auto name = names.find(key);
      const bool is_named = name != names.end();
      if (is_named && ignored.count(name->second)) continue;
      append(
          state, values_of(*found->second),
          is_named ? name->second : ddp::str("parameter ", p, " of ", group));
    }
  }
  options.insert(
      options.end(), std::make_move_iterator(state.begin()), std::make_move_iterator(state.end()));
  return options;
}

}  // namespace ddp
