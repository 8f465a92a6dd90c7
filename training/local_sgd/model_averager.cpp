#include <ddp/model_averager.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ddp/internal/check.h>

namespace ddp {
namespace {

void check_warmup(const char* subject, int64_t warmup_steps) {
  DDP_CHECK_VALUE(
      warmup_steps >= 0, subject, ": expected warmup_steps to be at least 0, got ", warmup_steps,
      ". Name the first step to average in.");
}

void check_period(const char* subject, int64_t period) {
  DDP_CHECK_VALUE(
      period >= 1, subject, ": expected a period of at least 1, got ", period,
      ". 1 averages in every step.");
}

// Averages tensors of one dtype and device, because at::cat keeps both only then.
void average(const std::vector<at::Tensor>& tensors, const ProcessGroup& group) {
  std::vector<at::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  std::vector<at::Tensor> together{at::cat(flat).div_(group->getSize())};
  group->allreduce(together)->wait();
  int64_t at = 0;
  for (const auto& tensor : tensors) {
    tensor.copy_(together[0].narrow(0, at, tensor.numel()).view(tensor.sizes()));
    at += tensor.numel();
  }
}

// Averages tensors of any dtypes and devices: one all-reduce of each kind.
void average_all(const std::vector<at::Tensor>& parameters, const ProcessGroup& group) {
  if (group->getSize() == 1) return;
  std::vector<std::vector<at::Tensor>> kinds;
  for (const auto& parameter : parameters) {
    size_t kind = 0;
    while (kind < kinds.size() && (kinds[kind][0].scalar_type() != parameter.scalar_type() ||
                                   kinds[kind][0].device() != parameter.device())) {
      ++kind;
    }
    if (kind == kinds.size()) kinds.emplace_back();
    kinds[kind].push_back(parameter);
  }
  for (const auto& kind : kinds) average(kind, group);
}

int64_t read_step(torch::serialize::InputArchive& archive) {
  c10::IValue step;
  archive.read("step", step);
  return step.toInt();
}

}  // namespace

void ModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  apply(parameters, step_++);
}

void ModelAverager::average_parameters(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : groups) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  average_parameters(parameters);
}

void ModelAverager::set_step(int64_t step) {
  DDP_CHECK_VALUE(
      step >= 0, "ModelAverager: expected a step of at least 0, got ", step, ". Name another.");
  step_ = step;
}

void ModelAverager::save(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(step_));
}

void ModelAverager::load(torch::serialize::InputArchive& archive) { set_step(read_step(archive)); }

PeriodicModelAverager::PeriodicModelAverager(
    int64_t period, int64_t warmup_steps, const GroupArg& group)
    : period_(period), warmup_steps_(warmup_steps), group_(group) {
  check_period("PeriodicModelAverager", period);
  check_warmup("PeriodicModelAverager", warmup_steps);
  (void)group_.given();
}

void PeriodicModelAverager::apply(const std::vector<at::Tensor>& parameters, int64_t step) {
  if (step < warmup_steps_ || (step - warmup_steps_) % period_ != 0) return;
  average_all(parameters, group_.get());
}

void PeriodicModelAverager::rebind(const GroupArg& group) { group_ = group.get(); }

PostLocalSGDOptimizer::PostLocalSGDOptimizer(
    std::shared_ptr<torch::optim::Optimizer> optimizer, std::shared_ptr<ModelAverager> averager)
    : optimizer_(std::move(optimizer)), averager_(std::move(averager)) {
  DDP_CHECK_VALUE(
      optimizer_ && averager_,
      "PostLocalSGDOptimizer: expected an optimizer and an averager, got a null pointer. Make both "
      "with std::make_shared.");
}

at::Tensor PostLocalSGDOptimizer::step(const torch::optim::Optimizer::LossClosure& closure) {
  auto loss = optimizer_->step(closure);
  averager_->average_parameters(optimizer_->param_groups());
  return loss;
}

void PostLocalSGDOptimizer::save(torch::serialize::OutputArchive& archive) const {
  optimizer_->save(archive);
  averager_->save(archive);
}

void PostLocalSGDOptimizer::load(torch::serialize::InputArchive& archive) {
  optimizer_->load(archive);
  averager_->load(archive);
}

}  // namespace ddp
