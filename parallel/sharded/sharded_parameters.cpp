#include "sharded/sharded_parameters.h"

#include <unordered_map>
#include <unordered_set>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/collectives.h>
#include <ddp/deferred_init.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/check.h>
#include <ddp/internal/cut_registry.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>
#include <torch/nn/modules/embedding.h>

namespace ddp {
namespace {

/// Finds the units in a module, and parameters that are in a unit and outside of it.
class UnitWalk {
 public:
  explicit UnitWalk(const ProcessGroup& group) : group_(group) {}

  void visit(torch::nn::Module& module, const std::string& path) {
    const auto prefix = path.empty() ? path : path + ".";
    if (auto* unit = dynamic_cast<FullyShardedBase*>(&module)) {
      units.emplace_back(path, unit);
      for (const auto& layout : layouts_of(module)) {
        const auto [at, is_new] = owners.emplace(layout.local.unsafeGetTensorImpl(), path);
        check_single(is_new, prefix + layout.name, at->second, path);
      }
      return;
    }
    DDP_CHECK_VALUE(
        dynamic_cast<DistributedDataParallelBase*>(&module) == nullptr,
        "FullyShardedDataParallel: expected a module whose gradients no other wrapper averages, "
        "but ",
        path.empty() ? "it" : path, " is a DistributedDataParallel ", on_rank_text(*group_),
        ". Pass the module in it.");
    const auto* embedding = module.as<torch::nn::EmbeddingImpl>();
    const auto* bag = module.as<torch::nn::EmbeddingBagImpl>();
    if (embedding != nullptr && embedding->options.sparse())
      sparse.insert(embedding->weight.unsafeGetTensorImpl());
    if (bag != nullptr && bag->options.sparse()) sparse.insert(bag->weight.unsafeGetTensorImpl());
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (item.value().defined()) outside.emplace_back(prefix + item.key(), item.value());
    }
    for (const auto& child : module.named_children()) visit(*child.value(), prefix + child.key());
  }
  void check_single(
      bool is_single, const std::string& name, const std::string& one,
      const std::string& other) const {
    DDP_CHECK_VALUE(
        is_single, "FullyShardedDataParallel: expected each parameter in one unit, got \"", name,
        "\" in ", one, " and in ", other.empty() ? "the module around it" : other, " ",
        on_rank_text(*group_), ". Wrap the module that holds both, and not them.");
  }

  std::vector<std::pair<std::string, FullyShardedBase*>> units;
  std::unordered_map<const void*, std::string> owners;  // path of the unit
  std::vector<std::pair<std::string, at::Tensor>> outside;
  std::unordered_set<const void*> sparse;  // parameters whose gradients are

 private:
  const ProcessGroup& group_;
};

/// The parameters of a unit, and the buffers that no unit inside has.
std::vector<at::Tensor> own_tensors(
    const torch::nn::Module& module, const SharedParameters& found) {
  std::vector<at::Tensor> tensors;
  for (const auto& layout : found.own) tensors.push_back(layout.local);
  std::unordered_set<const void*> of_units;
  for (const auto& unit : found.units) {
    for (const auto& buffer : unit.second->buffers()) of_units.insert(buffer.unsafeGetTensorImpl());
  }
  for (const auto& buffer : module.buffers()) {
    if (buffer.defined() && of_units.count(buffer.unsafeGetTensorImpl()) == 0) {
      tensors.push_back(buffer);
    }
  }
  return tensors;
}

void check_can_be_cut(const ParameterLayout& layout, const ProcessGroup& group) {
  const auto& p = layout.local;
  DDP_CHECK_VALUE(
      p.layout() == at::kStrided && (p.is_floating_point() || !p.requires_grad()) &&
          !p.is_complex(),
      "FullyShardedDataParallel: expected dense parameters of a floating type, got ", layout.name,
      " of ", p.layout(), " and ", p.scalar_type(), " ", on_rank_text(*group),
      ". Name it in ignored_parameters.");
}

}  // namespace

SharedParameters find_parameters(torch::nn::Module& module, const FullyShardedOptions& options) {
  const auto group = options.process_group().get();
  DDP_CHECK_VALUE(
      dynamic_cast<FullyShardedBase*>(&module) == nullptr,
      "FullyShardedDataParallel: expected a module that is not a unit already, got a unit ",
      on_rank_text(*group), ".");
  UnitWalk walk(group);
  walk.visit(module, "");
  for (const auto& [name, parameter] : walk.outside) {
    const auto owner = walk.owners.find(parameter.unsafeGetTensorImpl());
    if (owner != walk.owners.end()) walk.check_single(false, name, owner->second, "");
  }
  const auto& ignored = options.ignored_parameters();
  std::unordered_set<std::string> unknown(ignored.begin(), ignored.end());
  SharedParameters found;
  found.units = walk.units;
  for (auto& layout : layouts_of(module)) {
    if (walk.owners.count(layout.local.unsafeGetTensorImpl()) > 0) continue;
    const bool is_ignored = contains(ignored, layout.name);
    unknown.erase(layout.name);
    if (is_ignored) continue;
    DDP_CHECK_VALUE(
        cut_of(layout.local) != CutBy::Unit,
        "FullyShardedDataParallel: expected each parameter in one unit, got \"", layout.name,
        "\", which another unit has cut, ", on_rank_text(*group),
        ". Wrap the module that holds both uses, and make a new module to wrap it again.");
    check_can_be_cut(layout, group);
    DDP_CHECK_VALUE(
        !layout.local.requires_grad() || walk.sparse.count(layout.local.unsafeGetTensorImpl()) == 0,
        "FullyShardedDataParallel: expected parameters with dense gradients, got ", layout.name,
        ", whose are sparse, ", on_rank_text(*group),
        ". Make the Embedding with sparse(false), or name it in ignored_parameters.");
    found.own.push_back(std::move(layout));
  }
  DDP_CHECK_VALUE(
      unknown.empty(),
      "FullyShardedDataParallel: expected names of this unit's parameters in ignored_parameters, "
      "got ",
      joined_by(", ", unknown), " ", on_rank_text(*group), ".");
  if (!found.own.empty()) {
    const auto device = found.own[0].local.device();
    for (const auto& layout : found.own) {
      DDP_CHECK_VALUE(
          layout.local.device() == device,
          "FullyShardedDataParallel: expected parameters on one device, got ", found.own[0].name,
          " on ", device, " and ", layout.name, " on ", layout.local.device(), " ",
          on_rank_text(*group), ". Move the module to one device before.");
    }
  }
  return found;
}

void register_parts_of(torch::nn::Module& module, torch::nn::Module& other) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    other.register_parameter(item.key(), item.value(), item.value().requires_grad());
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    other.register_buffer(item.key(), item.value());
  }
  for (const auto& child : module.named_children()) {
    other.register_module(child.key(), child.value());
  }
}

std::vector<ProcessGroup> all_groups(const FullyShardedOptions& options) {
  std::vector<ProcessGroup> groups{options.process_group().get()};
  if (const auto& mesh = options.mesh(); mesh && mesh->names().size() == 2) {
    groups.push_back(mesh->group(mesh->names().front()));
  }
  return groups;
}

void agree_on_parameters(
    const std::vector<ParameterLayout>& own, const std::string& problem, const ProcessGroup& group,
    const MixedPrecisionPolicy& policy) {
  if (group->getSize() == 1) {
    DDP_CHECK_VALUE(problem.empty(), problem);
    return;
  }
  std::string text = problem.empty() ? "" : "!" + problem;
  for (const auto& layout : own) {
    text += ddp::str(
        layout.name, " ", at::IntArrayRef(layout.local.sizes()), " ", layout.local.scalar_type(),
        layout.local.requires_grad() ? "" : " frozen", policy.gather_int8() ? " in int8" : "",
        "\n");
  }
  agree(
      text, group, "comparing the parameters of a unit",
      [](const std::vector<std::string>& by_rank) -> std::string {
        for (const auto& text_of_rank : by_rank) {
          if (!text_of_rank.empty() && text_of_rank[0] == '!') return text_of_rank.substr(1);
        }
        const auto rank = first_different_rank(by_rank);
        if (rank == 0) return "";
        const auto [first, other] = different_lines(by_rank[0], by_rank[rank]);
        return ddp::str(
            "FullyShardedDataParallel: expected the same parameters on every rank, got ", first,
            " on rank 0 and ", other, " on rank ", rank, ". Build the same module on all ranks.");
      });
}

void materialize_own(const torch::nn::Module& module, const SharedParameters& found) {
  materialize(own_tensors(module, found));
}

void broadcast_parameters(
    const torch::nn::Module& module, const SharedParameters& found,
    const FullyShardedOptions& options) {
  const c10::NoGradGuard no_grad;
  for (const auto& group : all_groups(options)) {
    if (group->getSize() == 1) continue;
    for (const auto& own : own_tensors(module, found)) {
      const auto tensor = own.detach();
      auto value = tensor.contiguous();
      broadcast(value, 0, group);
      if (!value.is_same(tensor)) tensor.copy_(value);
    }
  }
}

}  // namespace ddp
