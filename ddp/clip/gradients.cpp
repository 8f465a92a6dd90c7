#include <ddp/gradients.h>

#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/parameter_layout.h>
#include <ddp/zero.h>

#include "clip/gradient_norm.h"
#include "wrapper/model_tensors.h"

namespace ddp {
namespace {

ZeroRedundancyOptimizerBase* as_sharded(torch::optim::Optimizer& optimizer) {
  return dynamic_cast<ZeroRedundancyOptimizerBase*>(&optimizer);
}

/// Leaves out parameters that were seen before: a module lists tied ones several times.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters, SeenTensors& seen) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    if (!seen.add(parameter)) continue;
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  return gradients;
}

std::vector<at::Tensor> gradients_of(torch::optim::Optimizer& optimizer) {
  if (const auto* sharded = as_sharded(optimizer)) return sharded->gradients();
  SeenTensors seen;
  std::vector<at::Tensor> gradients;
  for (const auto& group : optimizer.param_groups()) {
    for (auto& gradient : gradients_of(group.params(), seen)) {
      gradients.push_back(std::move(gradient));
    }
  }
  return gradients;
}

void check_may_clip(const char* call, const ZeroRedundancyOptimizerBase& optimizer) {
  DDP_CHECK(
      !optimizer.options().overlap(), call,
      ": expected gradients before their step, got those of a ZeroRedundancyOptimizer with "
      "overlap, which steps in the backward pass. Set overlap(false).");
  DDP_CHECK(
      !optimizer.is_in_join(), call,
      ": expected every rank to clip, got a ZeroRedundancyOptimizer in a join(), where ranks "
      "without input step their parts as they are. Clip outside of join(), or give every rank as "
      "much input.");
}

using Groups = std::vector<ProcessGroup>;

bool contains_ranks_of(const Groups& groups, const ProcessGroup& group) {
  return any_of(groups, [&](const ProcessGroup& other) { return have_same_ranks(other, group); });
}

void check_may_clip(const ShardedModule* module) {
  const auto error = module != nullptr ? module->clipping_error() : "";
  DDP_CHECK(error.empty(), "clip_grad_norm_: ", error);
}

/// The layouts of a module whose gradients are summed over the ranks.
std::vector<ParameterLayout> final_layouts_of(const torch::nn::Module& module) {
  check_may_clip(dynamic_cast<const ShardedModule*>(&module));
  for (const auto& part : module.modules(/*include_self=*/false)) {
    check_may_clip(dynamic_cast<const ShardedModule*>(part.get()));
  }
  auto layouts = layouts_of(module);
  for (const auto& layout : layouts) {
    const auto& gradient = layout.local.grad();
    DDP_CHECK_VALUE(
        !gradient.defined() || gradient.sizes() == layout.local.sizes(),
        "clip_grad_norm_: expected parameters as they are stepped, got ", layout.name, " of ",
        layout.local.sizes(), " with a gradient of ", gradient.sizes(),
        ". Clip outside of SummonFullParams, and after reshard().");
  }
  return layouts;
}

/// The device of parameters that every rank has; nothing for a pipeline's stage.
std::optional<c10::Device> common_device_of(const std::vector<ParameterLayout>& layouts) {
  if (layouts.empty()) return {};
  const auto device = layouts.front().local.device();
  const auto is_there = [&](const ParameterLayout& layout) {
    return !layout.stage && layout.local.device() == device;
  };
  return all_of(layouts, is_there) ? std::optional(device) : std::nullopt;
}

/// The groups of a mesh's axes that have more than one rank.
Groups axes_of(const DeviceMesh& mesh) {
  Groups groups;
  for (const auto& name : mesh.names()) {
    if (mesh.size(name) > 1) groups.push_back(mesh.group(name));
  }
  return groups;
}

/// The groups of the axes that cut a parameter.
///
/// \throws c10::ValueError  if it is cut over ranks that are not on the axes, or over a part of
/// one.
Groups axes_that_cut(const ParameterLayout& layout, const Groups& axes) {
  Groups cut;
  for (const auto& axis : axes) {
    if (is_cut_over(layout, *axis)) cut.push_back(axis);
  }
  for (const auto& parts : layout.sharded_over) {
    int64_t ranks = 1;
    for (const auto& axis : cut) {
      const auto common = count_common_ranks(*parts, *axis).value_or(1);
      // The other ranks of the axis have copies, which its sum would count.
      DDP_CHECK_VALUE(
          common == 1 || common == axis->getSize(),
          "clip_grad_norm_: expected a mesh with an axis of the ranks over which ", layout.name,
          " is cut, got one whose axis has ", common, " of them and ", axis->getSize() - common,
          " others. Make that axis two.");
      ranks *= common;
    }
    DDP_CHECK_VALUE(
        ranks == parts->getSize(), "clip_grad_norm_: expected a mesh of all ranks over which ",
        layout.name, " is cut, got one with ", ranks, " of its ", parts->getSize(),
        " parts. Pass the whole mesh.");
  }
  return cut;
}

/// Whether this rank's copy of a parameter counts: of what all ranks of an axis have, the first's.
bool counts_here(const ParameterLayout& layout, const Groups& cut, const Groups& axes) {
  const bool is_first = all_of(axes, [&](const ProcessGroup& axis) {
    return axis->getRank() == 0 || contains_ranks_of(cut, axis);
  });
  // Copies on some ranks of an axis that cuts it: of a tied parameter, in two stages.
  return is_first && none_of(layout.replicated_over, [&](const ProcessGroup& group) {
           return group->getRank() > 0 && any_of(cut, [&](const auto& axis) {
                    return count_common_ranks(*group, *axis).value_or(1) > 1;
                  });
         });
}

}  // namespace

void zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none) {
  if (auto* sharded = as_sharded(optimizer)) {
    sharded->zero_grad(set_to_none);
  } else {
    optimizer.zero_grad(set_to_none);
  }
}

GradientNorm clip_grad_norm_(
    torch::optim::Optimizer& optimizer, double max_norm, double norm_type) {
  const auto* sharded = as_sharded(optimizer);
  if (!sharded) return clip_sets({{gradients_of(optimizer), {}}}, max_norm, norm_type);
  check_may_clip("clip_grad_norm_", *sharded);
  return clip_sets(sharded->gradient_sets(), max_norm, norm_type);
}

GradientNorm clip_grad_norm_(
    const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
    const std::vector<ProcessGroup>& sharded_over) {
  SeenTensors seen;
  return clip_sets({{gradients_of(parameters, seen), sharded_over}}, max_norm, norm_type);
}

GradientNorm clip_grad_norm_(
    const std::vector<ShardedParameters>& sets, double max_norm, double norm_type) {
  SeenTensors seen;
  std::vector<ShardedGradients> gradients;
  for (const auto& set : sets) {
    gradients.push_back({gradients_of(set.parameters, seen), set.sharded_over});
  }
  return clip_sets(gradients, max_norm, norm_type);
}

GradientNorm clip_grad_norm_(
    const torch::nn::Module& module, double max_norm, double norm_type,
    const std::vector<ProcessGroup>& sharded_over) {
  Groups over_all;
  for (const auto& group : sharded_over) {
    if (!contains_ranks_of(over_all, group)) over_all.push_back(group);
  }
  GradientSets gradients;
  std::vector<at::Tensor> copies;
  for (const auto& layout : final_layouts_of(module)) {
    Groups groups;
    for (const auto& group : layout.sharded_over) {
      if (group->getSize() > 1 && !contains_ranks_of(over_all, group)) groups.push_back(group);
    }
    DDP_CHECK_VALUE(
        !layout.stage || contains_ranks_of(over_all, layout.sharded_over.back()),
        "clip_grad_norm_: expected the ranks of the pipeline among the groups, because each stage "
        "has other parameters, got ",
        over_all.size(), " other groups. Pass the mesh, or the pipeline's process_group, too.");
    if (counts_here(layout, layout.sharded_over, {})) {
      gradients.add(layout, groups, layout.local.grad());
    } else if (layout.local.grad().defined()) {
      copies.push_back(layout.local.grad());
    }
  }
  return clip_sets(gradients.sets(), max_norm, norm_type, over_all, copies);
}

GradientNorm clip_grad_norm_(
    const torch::nn::Module& module, double max_norm, const DeviceMesh& mesh, double norm_type) {
  DDP_CHECK_VALUE(
      norm_type > 0, "clip_grad_norm_: expected a norm_type above 0 with a mesh, got ", norm_type,
      ". 2 is usual.");
  const at::NoGradGuard no_grad;
  const auto axes = axes_of(mesh);
  GradientSets gradients;
  std::vector<at::Tensor> counted;
  const auto layouts = final_layouts_of(module);
  const auto device = common_device_of(layouts);
  for (const auto& layout : layouts) {
    const auto cut = axes_that_cut(layout, axes);
    const auto& gradient = layout.local.grad();
    gradients.add(layout, cut, gradient);
    if (gradient.defined() && counts_here(layout, cut, axes)) counted.push_back(gradient);
  }
  auto powers = sum_of_powers(counted, norm_type, device.value_or(c10::Device(at::kCPU))).view(1);
  for (const auto& axis : axes) powers = reduce_powers(axis, powers, norm_type, device);
  return clip_to(gradients.sets(), powers, norm_type, max_norm);
}

void clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value) {
  const auto* sharded = as_sharded(optimizer);
  if (sharded) check_may_clip("clip_grad_value_", *sharded);
  const at::NoGradGuard no_grad;
  for (const auto& gradient : gradients_of(optimizer)) gradient.clamp_(-clip_value, clip_value);
}

}  // namespace ddp
