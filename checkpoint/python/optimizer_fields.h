// Python's names of the options and the state of LibTorch's optimizers: `visit(fields, options)`
// passes each name with a reference to its value, so that one list serves saving and loading.
#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace ddp {

// `fixed`: an option that only Python has, with the one value that LibTorch implements. `choice`:
// an option that chooses among Python's implementations of the same function.

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

// The state of a parameter, depending on the options of its group.

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

}  // namespace ddp
