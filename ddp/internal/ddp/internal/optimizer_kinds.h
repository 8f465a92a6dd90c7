// LibTorch's optimizers and this library's in one table: their types and names, which of them
// update each parameter on its own, and their options and state. `visit_options(fields, options)`
// and `visit_state(fields, state, options)` pass each value with its name in Python to `fields`, so
// that one list serves saving, loading, comparing and dividing.
#pragma once

#include <tuple>
#include <type_traits>
#include <typeinfo>

#include <ddp/detail/zero_types.h>
#include <ddp/elementwise_optimizers.h>
#include <ddp/fused_optimizer.h>
#include <ddp/lamb.h>
#include <ddp/muon.h>
#include <torch/optim/lbfgs.h>

namespace ddp {

/// A row of the table.
template <typename OptimizerType>
struct OptimizerKind {
  using Optimizer = OptimizerType;
  using Options = typename detail::ZeroTypes<OptimizerType>::Options;
  using State = typename detail::ZeroTypes<OptimizerType>::State;
  /// Whether it updates each parameter by that parameter's gradient and state alone, and has
  /// visit_options().
  static constexpr bool kStepsEachParameter = true;

  const char* name;  // of the class, in C++ and in Python
};

/// LBFGS looks at all gradients together, several times a step. It has no visit_options().
template <>
struct OptimizerKind<torch::optim::LBFGS> {
  using Optimizer = torch::optim::LBFGS;
  using Options = torch::optim::LBFGSOptions;
  using State = torch::optim::LBFGSParamState;
  static constexpr bool kStepsEachParameter = false;

  const char* name;
};

inline constexpr std::tuple kOptimizerKinds{
    OptimizerKind<torch::optim::Adam>{"Adam"},
    OptimizerKind<torch::optim::AdamW>{"AdamW"},
    OptimizerKind<torch::optim::SGD>{"SGD"},
    OptimizerKind<torch::optim::RMSprop>{"RMSprop"},
    OptimizerKind<torch::optim::Adagrad>{"Adagrad"},
    OptimizerKind<optim::NAdam>{"NAdam"},
    OptimizerKind<optim::RAdam>{"RAdam"},
    OptimizerKind<optim::Adamax>{"Adamax"},
    OptimizerKind<optim::Adadelta>{"Adadelta"},
    OptimizerKind<optim::Lion>{"Lion"},
    OptimizerKind<optim::LAMB>{"LAMB"},
    OptimizerKind<optim::Muon>{"Muon"},
    OptimizerKind<torch::optim::LBFGS>{"LBFGS"}};

/// Calls `use(kind)` for each row, until it returns true; returns whether it did.
template <typename Use>
bool any_optimizer_kind(Use use) {
  return std::apply([&](const auto&... kind) { return (use(kind) || ...); }, kOptimizerKinds);
}

/// Calls `use(kind)` with the row of the optimizer's class, or of the class that a FusedOptimizer
/// derives from; returns false for another class, also for a program's own that derives from a
/// row's and may have more state.
template <typename Use>
bool with_kind(const torch::optim::Optimizer& optimizer, Use use) {
  const bool is_fused = dynamic_cast<const FusedOptimizer*>(&optimizer) != nullptr;
  return any_optimizer_kind([&](const auto& kind) {
    using Optimizer = typename std::decay_t<decltype(kind)>::Optimizer;
    const bool is_own = typeid(optimizer) == typeid(Optimizer);
    if (!is_own && !(is_fused && dynamic_cast<const Optimizer*>(&optimizer))) return false;
    use(kind);
    return true;
  });
}

/// Calls `use(kind, own)` with the row of a parameter's state, and the state as its class; returns
/// false for another class.
template <typename Use>
bool with_kind(torch::optim::OptimizerParamState& state, Use use) {
  return any_optimizer_kind([&](const auto& kind) {
    auto* own = dynamic_cast<typename std::decay_t<decltype(kind)>::State*>(&state);
    if (own != nullptr) use(kind, *own);
    return own != nullptr;
  });
}

/// Calls `use(kind, own)` with the row of a group's options, and the options as their class;
/// returns false for another class.
template <typename Use>
bool with_kind(torch::optim::OptimizerOptions& options, Use use) {
  return any_optimizer_kind([&](const auto& kind) {
    auto* own = dynamic_cast<typename std::decay_t<decltype(kind)>::Options*>(&options);
    if (own != nullptr) use(kind, *own);
    return own != nullptr;
  });
}

/// Whether the optimizer is none that looks at all gradients together; true for a program's own.
inline bool steps_each_parameter(const torch::optim::Optimizer& optimizer) {
  return !any_optimizer_kind([&](const auto& kind) {
    using Kind = std::decay_t<decltype(kind)>;
    return !Kind::kStepsEachParameter &&
           dynamic_cast<const typename Kind::Optimizer*>(&optimizer) != nullptr;
  });
}

/// The base of a class that takes some fields of options and leaves the others out.
struct NoFields {
  template <typename Value>
  void number(const char* /*name*/, Value&& /*value*/) {}
  template <typename Value>
  void pair(const char* /*name*/, Value&& /*value*/) {}
  template <typename Value>
  void triple(const char* /*name*/, Value&& /*value*/) {}
  template <typename Value>
  void count(const char* /*name*/, Value&& /*value*/) {}
  template <typename Value>
  void text(const char* /*name*/, Value&& /*value*/) {}
  template <typename Value>
  void dtype(const char* /*name*/, Value&& /*value*/) {}
  template <typename Value>
  void flag(const char* /*name*/, Value&& /*value*/) {}
  void fixed(const char* /*name*/, bool /*value*/) {}
  void choice(const char* /*name*/) {}
};

// Options. `fixed`: an option that only Python has, with the one value that C++ implements.
// `choice`: an option that chooses among Python's implementations of the same function. `dtype`: an
// option that Python lacks.

template <typename Fields, typename Options>
void visit_adam_options(Fields& fields, Options& o, bool decoupled) {
  fields.number("lr", o.lr());
  fields.pair("betas", o.betas());
  fields.number("eps", o.eps());
  fields.number("weight_decay", o.weight_decay());
  fields.flag("amsgrad", o.amsgrad());
  fields.fixed("maximize", false);
  fields.choice("foreach");
  fields.fixed("capturable", false);
  fields.fixed("differentiable", false);
  fields.choice("fused");
  fields.fixed("decoupled_weight_decay", decoupled);
}

template <typename Fields>
void visit_options(Fields& fields, torch::optim::AdamOptions& o) {
  visit_adam_options(fields, o, /*decoupled=*/false);
}

template <typename Fields>
void visit_options(Fields& fields, torch::optim::AdamWOptions& o) {
  visit_adam_options(fields, o, /*decoupled=*/true);
}

template <typename Fields>
void visit_options(Fields& fields, torch::optim::SGDOptions& o) {
  fields.number("lr", o.lr());
  fields.number("momentum", o.momentum());
  fields.number("dampening", o.dampening());
  fields.number("weight_decay", o.weight_decay());
  fields.flag("nesterov", o.nesterov());
  fields.fixed("maximize", false);
  fields.choice("foreach");
  fields.fixed("differentiable", false);
  fields.choice("fused");
}

template <typename Fields>
void visit_options(Fields& fields, torch::optim::RMSpropOptions& o) {
  fields.number("lr", o.lr());
  fields.number("momentum", o.momentum());
  fields.number("alpha", o.alpha());
  fields.number("eps", o.eps());
  fields.flag("centered", o.centered());
  fields.number("weight_decay", o.weight_decay());
  fields.fixed("capturable", false);
  fields.choice("foreach");
  fields.fixed("maximize", false);
  fields.fixed("differentiable", false);
}

template <typename Fields>
void visit_options(Fields& fields, torch::optim::AdagradOptions& o) {
  fields.number("lr", o.lr());
  fields.number("lr_decay", o.lr_decay());
  fields.number("eps", o.eps());
  fields.number("weight_decay", o.weight_decay());
  fields.number("initial_accumulator_value", o.initial_accumulator_value());
  fields.choice("foreach");
  fields.fixed("maximize", false);
  fields.fixed("differentiable", false);
  fields.choice("fused");
}

template <typename Fields>
void visit_python_choices(Fields& fields) {
  fields.fixed("maximize", false);
  fields.choice("foreach");
  fields.fixed("capturable", false);
  fields.fixed("differentiable", false);
}

template <typename Fields, typename Options>
void visit_betas_options(Fields& fields, Options& o) {
  fields.number("lr", o.lr());
  fields.pair("betas", o.betas());
  fields.number("eps", o.eps());
  fields.number("weight_decay", o.weight_decay());
}

template <typename Fields>
void visit_options(Fields& fields, optim::NAdamOptions& o) {
  visit_betas_options(fields, o);
  fields.number("momentum_decay", o.momentum_decay());
  fields.flag("decoupled_weight_decay", o.decoupled_weight_decay());
  visit_python_choices(fields);
}

template <typename Fields>
void visit_options(Fields& fields, optim::RAdamOptions& o) {
  visit_betas_options(fields, o);
  fields.flag("decoupled_weight_decay", o.decoupled_weight_decay());
  visit_python_choices(fields);
}

template <typename Fields>
void visit_options(Fields& fields, optim::AdamaxOptions& o) {
  visit_betas_options(fields, o);
  visit_python_choices(fields);
}

template <typename Fields>
void visit_options(Fields& fields, optim::AdadeltaOptions& o) {
  fields.number("lr", o.lr());
  fields.number("rho", o.rho());
  fields.number("eps", o.eps());
  fields.number("weight_decay", o.weight_decay());
  visit_python_choices(fields);
}

template <typename Fields>
void visit_options(Fields& fields, optim::LionOptions& o) {
  fields.number("lr", o.lr());
  fields.pair("betas", o.betas());
  fields.number("weight_decay", o.weight_decay());
}

template <typename Fields>
void visit_options(Fields& fields, optim::LAMBOptions& o) {
  visit_betas_options(fields, o);
}

template <typename Fields>
void visit_options(Fields& fields, optim::MuonOptions& o) {
  fields.number("lr", o.lr());
  fields.number("weight_decay", o.weight_decay());
  fields.number("momentum", o.momentum());
  fields.flag("nesterov", o.nesterov());
  fields.triple("ns_coefficients", o.ns_coefficients());
  fields.number("eps", o.eps());
  fields.count("ns_steps", o.ns_steps());
  fields.text("adjust_lr_fn", o.adjust_lr_fn());
  fields.dtype("ns_dtype", o.ns_dtype());
}

// The state of a parameter. `scalar`: a number that a step changes. The options of its group decide
// which tensors a step needs.

template <typename Fields, typename State, typename Options>
void visit_adam_state(Fields& fields, State& s, const Options& o) {
  fields.step("step", s.step());
  fields.tensor("exp_avg", s.exp_avg(), /*is_required=*/true);
  fields.tensor("exp_avg_sq", s.exp_avg_sq(), /*is_required=*/true);
  fields.tensor("max_exp_avg_sq", s.max_exp_avg_sq(), o.amsgrad());
}

template <typename Fields>
void visit_state(
    Fields& fields, torch::optim::AdamParamState& s, const torch::optim::AdamOptions& o) {
  visit_adam_state(fields, s, o);
}

template <typename Fields>
void visit_state(
    Fields& fields, torch::optim::AdamWParamState& s, const torch::optim::AdamWOptions& o) {
  visit_adam_state(fields, s, o);
}

template <typename Fields>
void visit_state(
    Fields& fields, torch::optim::SGDParamState& s, const torch::optim::SGDOptions& o) {
  fields.tensor("momentum_buffer", s.momentum_buffer(), o.momentum() != 0);
}

template <typename Fields>
void visit_state(
    Fields& fields, torch::optim::RMSpropParamState& s, const torch::optim::RMSpropOptions& o) {
  fields.step("step", s.step());
  fields.tensor("square_avg", s.square_avg(), /*is_required=*/true);
  fields.tensor("momentum_buffer", s.momentum_buffer(), o.momentum() > 0);
  fields.tensor("grad_avg", s.grad_avg(), o.centered());
}

template <typename Fields>
void visit_state(
    Fields& fields, torch::optim::AdagradParamState& s, const torch::optim::AdagradOptions& o) {
  (void)o;
  fields.step("step", s.step());
  fields.tensor("sum", s.sum(), /*is_required=*/true);
}

template <typename Fields, typename State>
void visit_averages(Fields& fields, State& s) {
  fields.step("step", s.step());
  fields.tensor("exp_avg", s.exp_avg(), /*is_required=*/true);
  fields.tensor("exp_avg_sq", s.exp_avg_sq(), /*is_required=*/true);
}

template <typename Fields>
void visit_state(Fields& fields, optim::NAdamParamState& s, const optim::NAdamOptions& /*o*/) {
  visit_averages(fields, s);
  fields.scalar("mu_product", s.mu_product());
}

template <typename Fields>
void visit_state(Fields& fields, optim::RAdamParamState& s, const optim::RAdamOptions& /*o*/) {
  visit_averages(fields, s);
}

template <typename Fields>
void visit_state(Fields& fields, optim::LAMBParamState& s, const optim::LAMBOptions& /*o*/) {
  visit_averages(fields, s);
}

template <typename Fields>
void visit_state(Fields& fields, optim::AdamaxParamState& s, const optim::AdamaxOptions& /*o*/) {
  fields.step("step", s.step());
  fields.tensor("exp_avg", s.exp_avg(), /*is_required=*/true);
  fields.tensor("exp_inf", s.exp_inf(), /*is_required=*/true);
}

template <typename Fields>
void visit_state(
    Fields& fields, optim::AdadeltaParamState& s, const optim::AdadeltaOptions& /*o*/) {
  fields.step("step", s.step());
  fields.tensor("square_avg", s.square_avg(), /*is_required=*/true);
  fields.tensor("acc_delta", s.acc_delta(), /*is_required=*/true);
}

template <typename Fields>
void visit_state(Fields& fields, optim::LionParamState& s, const optim::LionOptions& /*o*/) {
  fields.step("step", s.step());
  fields.tensor("exp_avg", s.exp_avg(), /*is_required=*/true);
}

template <typename Fields>
void visit_state(Fields& fields, optim::MuonParamState& s, const optim::MuonOptions& /*o*/) {
  fields.tensor("momentum_buffer", s.momentum_buffer(), /*is_required=*/true);
}

template <typename Fields>
void visit_state(
    Fields& fields, torch::optim::LBFGSParamState& s, const torch::optim::LBFGSOptions& o) {
  (void)o;
  fields.count("func_evals", s.func_evals());
  fields.count("n_iter", s.n_iter());
  fields.number("t", s.t());
  fields.number("prev_loss", s.prev_loss());
  fields.tensor("d", s.d(), /*is_required=*/false);
  fields.tensor("H_diag", s.H_diag(), /*is_required=*/false);
  fields.tensor("prev_flat_grad", s.prev_flat_grad(), /*is_required=*/false);
  fields.tensors("old_dirs", s.old_dirs());
  fields.tensors("old_stps", s.old_stps());
  fields.tensors("ro", s.ro());
}

}  // namespace ddp
