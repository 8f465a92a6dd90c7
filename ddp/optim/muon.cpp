#include <ddp/muon.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/Functions.h>
#include <ddp/internal/check.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/ranges.h>
#include <ddp/join.h>
#include <ddp/parameter_layout.h>

#include "optim/listed_optimizer.h"
#include "optim/matrix_exchange.h"
#include "optim/orthogonalize.h"
#include "wrapper/optimizer_in_backward.h"

DDP_LISTED_OPTIMIZER(ddp::optim::MuonOptions, ddp::optim::MuonParamState)

namespace ddp {

// The operations of Python's, in their order, so that bits agree.
at::Tensor orthogonalize(const at::Tensor& update, const optim::MuonOptions& options) {
  const auto [a, b, c] = options.ns_coefficients();
  const bool is_tall = update.size(0) > update.size(1);
  auto matrix = update.to(options.ns_dtype(), /*non_blocking=*/false, /*copy=*/true);
  if (is_tall) matrix = matrix.t();
  matrix.div_(matrix.norm().clamp_min(options.eps()));
  for (int64_t i = 0; i < options.ns_steps(); ++i) {
    const auto gram = matrix.mm(matrix.t());
    const auto polynomial = at::addmm(gram, gram, gram, /*beta=*/b, /*alpha=*/c);
    matrix = at::addmm(matrix, polynomial, matrix, /*beta=*/a);
  }
  return is_tall ? matrix.t() : matrix;
}

double adjusted_rate(const optim::MuonOptions& options, int64_t rows, int64_t columns) {
  const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
  const bool matches_rms = options.adjust_lr_fn().value_or("") == "match_rms_adamw";
  return options.lr() *
         (matches_rms ? 0.2 * std::sqrt(std::max(r, c)) : std::sqrt(std::max(1.0, r / c)));
}

namespace optim {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

/// \param places  the parameters that have a matrix in flat memory.
/// \throws c10::ValueError  a parameter that is no matrix.
void check_are_matrices(const Groups& groups, const detail::WholeTensors& places) {
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const auto& p : groups[g].params()) {
      if (places.count(p.unsafeGetTensorImpl()) > 0) continue;
      DDP_CHECK_VALUE(
          p.dim() == 2, "ddp::optim::Muon: expected parameters of two dimensions, got one of ",
          p.sizes(), " in group ", g,
          ". Step it with another optimizer, as AdamW; split_for_muon() tells them apart.");
    }
  }
}

/// A rank whose input has ended takes no step with the others, except where backward steps.
void check_is_in_no_uneven_join(const std::vector<ProcessGroup>& over) {
  const bool is_alone = !any_of(over, [](const auto& group) { return group->getSize() > 1; });
  DDP_CHECK(
      is_alone || !detail::in_uneven_join() || OptimizerInBackward::is_stepping(),
      "ddp::optim::Muon: expected a join that ends as soon as one rank has no input, got a step of "
      "a Muon made from a model in one that goes on, in which ranks without input take no step. "
      "Take ZeroRedundancyOptimizer<ddp::optim::Muon> as one of the join's objects, "
      "ddp::optim::Muon(ddp::optim::split_for_muon(*model).matrices), which each rank steps "
      "whole, or model->step_in_backward(muon).");
}

Groups all_matrices_of(const torch::nn::Module& model) {
  Groups groups;
  groups.emplace_back(split_for_muon(model).matrices);
  return groups;
}

}  // namespace

MuonSplit split_for_muon(const torch::nn::Module& model) {
  MuonSplit split;
  for (const auto& layout : layouts_of(model)) {
    if (!layout.local.requires_grad()) continue;
    (layout.sizes.size() == 2 ? split.matrices : split.others).push_back(layout.local);
  }
  return split;
}

Muon::Muon(const Groups& groups, const MuonOptions& defaults) : ListedOptimizer(groups, defaults) {
  check_are_matrices(groups, places_);
}

Muon::Muon(std::vector<at::Tensor> parameters, const MuonOptions& defaults)
    : Muon(Groups{torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

Muon::Muon(const torch::nn::Module& model, const MuonOptions& defaults)
    : Muon(model, all_matrices_of(model), defaults) {}

Muon::Muon(const torch::nn::Module& model, const Groups& groups, const MuonOptions& defaults)
    : ListedOptimizer(groups, defaults),
      together_(std::make_unique<MatrixExchanges>(model, groups)) {}

Muon::Muon(const Groups& groups, detail::WholeTensors places, const MuonOptions& defaults)
    : ListedOptimizer(groups, defaults), places_(std::move(places)) {}

Muon::~Muon() = default;

std::vector<ProcessGroup> Muon::process_groups() const {
  return together_ ? together_->process_groups() : std::vector<ProcessGroup>();
}

// Before a step, because groups may have been added.
void Muon::check_groups() {
  detail::check_options<MuonOptions>("ddp::optim::Muon", *this);
  detail::check_gradients("ddp::optim::Muon", *this);
  if (together_) return check_is_in_no_uneven_join(process_groups());
  detail::check_are_whole(
      "ddp::optim::Muon", *this, "Make it from the model: ddp::optim::Muon(*model, options).");
  check_are_matrices(param_groups(), places_);
}

// The parameter's tensor as a matrix.
at::Tensor Muon::shaped(const at::Tensor& parameter, const at::Tensor& tensor) const {
  const auto place = places_.find(parameter.unsafeGetTensorImpl());
  return place == places_.end() ? tensor
                                : tensor.as_strided(place->second.sizes, place->second.strides);
}

// The update before it is made orthogonal.
at::Tensor Muon::averaged(const MuonOptions& options, const at::Tensor& parameter) {
  auto& momentum = state_of(parameter).momentum_buffer();
  const auto& gradient = parameter.grad();
  if (!momentum.defined()) momentum = at::zeros_like(gradient);
  momentum.lerp_(gradient, 1 - options.momentum());
  return options.nesterov() ? gradient.lerp(momentum, options.momentum()) : momentum;
}

void Muon::step_alone(const MuonOptions& options, const at::Tensor& parameter) {
  const auto update = shaped(parameter, averaged(options, parameter));
  const auto orthogonal = orthogonalize(update, options);
  parameter.mul_(1 - options.lr() * options.weight_decay());
  const double rate = adjusted_rate(options, update.size(0), update.size(1));
  shaped(parameter, parameter).add_(orthogonal, -rate);
}

void Muon::step_together() {
  auto jobs_by_key = together_->jobs_of(param_groups());
  together_->compare_gradients(jobs_by_key);
  for (auto& [key, jobs] : jobs_by_key) {
    for (auto& job : jobs) {
      if (job.parameter.grad().defined()) job.update = averaged(*job.options, job.parameter);
    }
    together_->orthogonalize(jobs);
    for (const auto& job : jobs) {
      if (!job.update.defined()) continue;
      const auto& options = *job.options;
      job.parameter.mul_(1 - options.lr() * options.weight_decay());
      job.own_elements().add_(
          job.update, -adjusted_rate(options, job.matrix->rows, job.matrix->columns));
    }
  }
}

at::Tensor Muon::step(LossClosure closure) {
  const auto loss = detail::loss_of(closure);
  const c10::NoGradGuard no_grad;
  check_groups();
  if (together_) {
    step_together();
    return loss;
  }
  for (auto& group : param_groups()) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    for (const auto& p : group.params()) {
      if (p.grad().defined()) step_alone(options, p);
    }
  }
  return loss;
}

}  // namespace optim
}  // namespace ddp
