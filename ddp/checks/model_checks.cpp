#include "checks/model_checks.h"

#include <unordered_set>

#include <ddp/internal/check.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

void check_averages_alone(
    const std::string& name, const torch::nn::Module& module, const c10d::ProcessGroup& group) {
  const auto* sharded = dynamic_cast<const ShardedModule*>(&module);
  DDP_CHECK_VALUE(
      sharded == nullptr || !sharded->reduces_gradients(),
      "DistributedDataParallel: expected a module whose gradients no other wrapper averages, but ",
      name, " is a FullyShardedDataParallel ", on_rank_text(group),
      ". For replicas of it, give FullyShardedOptions a mesh of two axes.");
}

}  // namespace

void check_names_to_ignore(const torch::nn::Module& module, const std::vector<std::string>& names) {
  const auto parameters = module.named_parameters();
  const auto buffers = module.named_buffers();
  for (const auto& name : names) {
    DDP_CHECK_VALUE(
        parameters.contains(name) || buffers.contains(name),
        "DistributedDataParallelOptions: expected parameters_to_ignore to name parameters or "
        "buffers of the module, got \"",
        name,
        "\". Use the full names of module->named_parameters(), without a leading \"module.\".");
  }
}

void check_devices(const std::vector<NamedParameter>& parameters, const ProcessGroup& group) {
  const auto& first = parameters.front();
  for (const auto& p : parameters) {
    DDP_CHECK_VALUE(
        p.tensor.device().type() == first.tensor.device().type(),
        "DistributedDataParallel: expected all parameters on one type of device, got \"",
        first.name, "\" on ", first.tensor.device(), " and \"", p.name, "\" on ", p.tensor.device(),
        ". Move the module before wrapping it.");
  }
  const auto type = first.tensor.device().type();
  const auto devices = group->getDeviceTypes();
  DDP_CHECK_VALUE(
      devices.empty() || any_of(devices, [&](const c10::Device& d) { return d.type() == type; }),
      "DistributedDataParallel: expected a process group with a backend for ", type,
      ", where the parameters are, got one for ", joined_by(", ", devices),
      ". Choose the backend in ProcessGroupOptions, or move the module.");
}

void check_layouts(const std::vector<StateTensor>& state) {
  for (const auto& s : state) {
    DDP_CHECK_VALUE(
        s.tensor.layout() == at::kStrided && !s.tensor.is_quantized(),
        "DistributedDataParallel: expected dense parameters and buffers of plain numbers, got ",
        s.is_parameter ? "parameter" : "buffer", " \"", s.name, "\" of layout ", s.tensor.layout(),
        " and dtype ", s.tensor.scalar_type(),
        ". Make it dense, or put its name into parameters_to_ignore.");
  }
}

void check_not_cut(
    const torch::nn::Module& module, const std::vector<std::string>& ignored,
    const c10d::ProcessGroup& group) {
  check_averages_alone("it", module, group);
  for (const auto& part : module.named_modules("", /*include_self=*/false)) {
    check_averages_alone(ddp::str('"', part.key(), '"'), *part.value(), group);
  }
  for (const auto& layout : layouts_of(module)) {
    if (contains(ignored, layout.name)) continue;
    DDP_CHECK_VALUE(
        !is_cut_over(layout, group),
        "DistributedDataParallel: expected a group whose ranks have the same parameters, got one "
        "whose ranks have parts of \"",
        layout.name, "\" ", on_rank_text(group),
        ". Give process_group the ranks that have the same part: mesh.group(\"dp\").");
  }
}

void check_outside(const std::vector<at::Tensor>& tensors, const torch::nn::Module& module) {
  std::unordered_set<const void*> seen;
  for (const auto& p : module.parameters()) seen.insert(p.unsafeGetTensorImpl());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& t = tensors[i];
    DDP_CHECK_VALUE(
        t.defined() && t.is_leaf() && t.requires_grad(),
        "also_average: expected leaves that require a gradient, got at ", i,
        t.defined() ? " one that is none, or requires none. " : " an undefined tensor. ",
        "Make it with requires_grad, and give the optimizer the same tensor.");
    DDP_CHECK_VALUE(
        seen.insert(t.unsafeGetTensorImpl()).second,
        "also_average: expected tensors of no module, each once, got at ", i,
        " one that is a parameter of the model, or comes twice. Leave it out.");
  }
}

std::optional<c10::Device> checked_input_device(
    const std::vector<c10::Device>& device_ids, const std::vector<NamedParameter>& parameters) {
  if (device_ids.empty()) return {};
  DDP_CHECK_VALUE(
      device_ids.size() == 1,
      "DistributedDataParallelOptions: expected at most one device in device_ids, got ",
      device_ids.size(), ". Run one rank per device.");
  for (const auto& p : parameters) {
    DDP_CHECK_VALUE(
        !device_ids.front().is_cpu() && p.tensor.device() == device_ids.front(),
        "DistributedDataParallelOptions: expected device_ids only for a module on that one "
        "accelerator, got ",
        device_ids.front(), " while \"", p.name, "\" is on ", p.tensor.device(),
        ". Move the module there, or leave device_ids empty.");
  }
  return device_ids.front();
}

}  // namespace ddp
