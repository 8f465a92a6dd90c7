#include "replicas/optimizer_values.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <iterator>
#include <sstream>
#include <unordered_map>

#include <ddp/internal/text.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
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

std::vector<at::Tensor> to_vector(const std::deque<at::Tensor>& tensors) {
  return {tensors.begin(), tensors.end()};
}

template <typename Moments>
Values moments(const Moments& state) {
  return {
      {"step", state.step()},
      {"exp_avg", state.exp_avg()},
      {"exp_avg_sq", state.exp_avg_sq()},
      {"max_exp_avg_sq", state.max_exp_avg_sq()}};
}

// Reads LibTorch's own states directly: without a copy, and since LBFGS's cannot be serialized
// after a step.
Values values_of(const optim::OptimizerParamState& state) {
  if (const auto* s = dynamic_cast<const optim::SGDParamState*>(&state)) {
    return {{"momentum_buffer", s->momentum_buffer()}};
  }
  if (const auto* s = dynamic_cast<const optim::AdamParamState*>(&state)) return moments(*s);
  if (const auto* s = dynamic_cast<const optim::AdamWParamState*>(&state)) return moments(*s);
  if (const auto* s = dynamic_cast<const optim::RMSpropParamState*>(&state)) {
    return {
        {"step", s->step()},
        {"square_avg", s->square_avg()},
        {"momentum_buffer", s->momentum_buffer()},
        {"grad_avg", s->grad_avg()}};
  }
  if (const auto* s = dynamic_cast<const optim::AdagradParamState*>(&state)) {
    return {{"step", s->step()}, {"sum", s->sum()}};
  }
  if (const auto* s = dynamic_cast<const optim::LBFGSParamState*>(&state)) {
    return {
        {"func_evals", s->func_evals()},
        {"n_iter", s->n_iter()},
        {"t", s->t()},
        {"prev_loss", s->prev_loss()},
        {"d", s->d()},
        {"H_diag", s->H_diag()},
        {"prev_flat_grad", s->prev_flat_grad()},
        {"old_dirs", to_vector(s->old_dirs())},
        {"old_stps", to_vector(s->old_stps())},
        {"ro", to_vector(s->ro())}};
  }
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
