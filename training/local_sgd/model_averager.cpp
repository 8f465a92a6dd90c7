#include <ddp/model_averager.h>

#include <numeric>

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

constexpr const char* kHierarchical = "HierarchicalModelAverager";

// Makes groups of consecutive ranks of `all`.
std::map<int64_t, ProcessGroup> make_groups(
    const std::map<int64_t, int>& sizes, const ProcessGroup& all) {
  const int world_size = all->getSize();
  for (const auto& [period, size] : sizes) {
    DDP_CHECK_VALUE(
        size >= 1 && world_size % size == 0, kHierarchical,
        ": expected groups whose size divides the ", world_size, " ranks, got ", size, " every ",
        period, " steps. Name another size.");
  }
  DDP_CHECK_VALUE(
      !sizes.empty() && sizes.rbegin()->second == world_size, kHierarchical,
      ": expected the longest period to average over all ", world_size, " ranks, got ",
      sizes.empty() ? 0 : sizes.rbegin()->second, ". Add a period with all of them.");
  std::map<int64_t, ProcessGroup> groups;
  for (const auto& [period, size] : sizes) {
    if (size == world_size) groups[period] = all;
    if (size == world_size) continue;
    for (int first = 0; first < world_size; first += size) {
      std::vector<int> ranks(static_cast<size_t>(size));
      std::iota(ranks.begin(), ranks.end(), first);
      const auto made = new_group(ranks, all);
      const bool is_mine = all->getRank() >= first && all->getRank() < first + size;
      if (is_mine) groups[period] = made;
    }
  }
  return groups;
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

HierarchicalModelAverager::HierarchicalModelAverager(
    int64_t warmup_steps, std::map<int64_t, ProcessGroup> group_of_period)
    : group_of_period_(std::move(group_of_period)), warmup_steps_(warmup_steps) {
  check_warmup(kHierarchical, warmup_steps);
  int size_before = 0;
  for (const auto& [period, group] : group_of_period_) {
    check_period(kHierarchical, period);
    DDP_CHECK_VALUE(
        group, kHierarchical, ": expected a group for period ", period, ", got none. Name one.");
    const int size = group->getSize();
    DDP_CHECK_VALUE(
        size > size_before, kHierarchical, ": expected larger groups for longer periods, got ",
        size, " ranks every ", period, " steps, and ", size_before,
        " more often. Name a larger group, or fewer periods.");
    size_before = size;
  }
  DDP_CHECK_VALUE(
      !group_of_period_.empty(), kHierarchical,
      ": expected at least one period, got none. Name {period, size of the group}.");
}

HierarchicalModelAverager::HierarchicalModelAverager(
    const std::map<int64_t, int>& group_size_of_period, int64_t warmup_steps)
    : HierarchicalModelAverager(warmup_steps, make_groups(group_size_of_period, default_group())) {
  group_size_of_period_ = group_size_of_period;
}

void HierarchicalModelAverager::rebind(const GroupArg& group) {
  DDP_CHECK(
      !group_size_of_period_.empty(), kHierarchical,
      "::rebind: expected an averager that made its groups, got one with groups of the program's. "
      "Make another with over().");
  group_of_period_ = make_groups(group_size_of_period_, group.get());
}

HierarchicalModelAverager HierarchicalModelAverager::over(
    std::map<int64_t, ProcessGroup> group_of_period, int64_t warmup_steps) {
  return {warmup_steps, std::move(group_of_period)};
}

void HierarchicalModelAverager::apply(const std::vector<at::Tensor>& parameters, int64_t step) {
  if (const auto group = group_of_step(step)) average_all(parameters, group);
}

// None in a step that does not average.
ProcessGroup HierarchicalModelAverager::group_of_step(int64_t step) const {
  if (step < warmup_steps_) return {};
  for (auto entry = group_of_period_.rbegin(); entry != group_of_period_.rend(); ++entry) {
    if (step % entry->first == 0) return entry->second;
  }
  return {};
}

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
