#include "checkpointer/cut_parts_of_run.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include <ddp/internal/check.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "parts/cut_parts.h"

namespace ddp {
namespace {

using detail::CutOptimizerPart;

/// Returns the layouts of all models that the run's ranks share, or of the models of each rank.
LayoutsByParameter layouts_in(const CheckpointedRun& run, bool of_per_rank = false) {
  auto layouts = layouts_of_parts(run.parts, of_per_rank);
  layouts.merge(layouts_of_parts(run.cut_models, of_per_rank));
  return layouts;
}

bool is_cut(const torch::nn::Module& module, const c10d::ProcessGroup& group) {
  const auto layouts = layouts_of(module);
  return any_of(
      layouts, [&](const ParameterLayout& layout) { return is_cut_within(layout, group); });
}

template <typename Predicate>
bool any_parameter(const torch::optim::Optimizer& optimizer, const Predicate& predicate) {
  const auto& groups = optimizer.param_groups();
  return any_of(groups, [&](const auto& group) { return any_of(group.params(), predicate); });
}

bool is_cut(
    const torch::optim::Optimizer& optimizer, const LayoutsByParameter& layouts,
    const c10d::ProcessGroup& group) {
  return any_parameter(optimizer, [&](const at::Tensor& parameter) {
    const auto found = layouts.find(parameter.unsafeGetTensorImpl());
    return found != layouts.end() && is_cut_within(found->second, group);
  });
}

bool is_whole(const LayoutsByParameter& layouts) {
  return none_of(layouts, [](const auto& item) { return is_in_parts(item.second); });
}

/// Throws for an optimizer of which rank 0's state would be saved for all, while each rank saves
/// its own part of the model.
void check_optimizers(const CheckpointedRun& run) {
  const auto own = layouts_in(run, /*of_per_rank=*/true);
  if (own.empty()) return;
  const auto shared = layouts_in(run);
  const auto is_cut_here = [&](const at::Tensor& parameter) {
    const auto* key = parameter.unsafeGetTensorImpl();
    const auto found = own.find(key);
    return found != own.end() && shared.count(key) == 0 && is_cut_over(found->second, *run.group);
  };
  for (const auto& named : run.parts) {
    const auto* optimizer = named.is_per_rank ? nullptr : named.part->optimizer();
    DDP_CHECK_VALUE(
        optimizer == nullptr || !any_parameter(*optimizer, is_cut_here),
        "Checkpointer: expected \"", named.name,
        "\", whose parameters are cut over the ranks, to be added as their model is, got add() for "
        "it and add_per_rank() for the model. Add both by add().");
  }
}

ShardedPart sharded_part_of(const NamedPart& named) {
  ShardedPart part{
      named.name, [part = named.part] { return detail::shards_of_module(*part->module()); }};
  part.has_copies = true;
  part.other_names = [part = named.part] { return detail::other_names_in(*part->module()); };
  part.whole = std::make_shared<detail::CutModelPart>(named.part);
  return part;
}

ShardedPart sharded_part_of(
    const std::string& name, const std::shared_ptr<CutOptimizerPart>& optimizer) {
  ShardedPart part{name, [optimizer] { return optimizer->take_shards(); }};
  part.whole = optimizer;
  part.has_copies = true;
  part.is_read_elsewhere = true;
  return part;
}

/// Returns the names of parts that are cut on this rank; for an optimizer also the names of its
/// parameters, whose numbers may differ between ranks.
std::map<std::string, std::string> find_cut_parts(const CheckpointedRun& run) {
  std::map<std::string, std::string> cut;
  for (const auto& named : run.parts) {
    const auto* module = named.is_per_rank ? nullptr : named.part->module();
    if (module != nullptr && is_cut(*module, *run.group)) cut[named.name];
  }
  if (cut.empty() && run.cut_models.empty()) return cut;
  const auto layouts = layouts_in(run);
  for (const auto& named : run.parts) {
    auto* optimizer = named.is_per_rank ? nullptr : named.part->optimizer();
    if (optimizer == nullptr) continue;
    const auto* divided = dynamic_cast<const CutOptimizerPart*>(named.part.get());
    // One rank's state is the whole one where no layer is in parts.
    const bool is_of_one = !named.part->has_named_state() && is_whole(layouts);
    const bool is_found = is_cut(*optimizer, layouts, *run.group) && !is_of_one;
    if (divided == nullptr && !is_found) continue;
    cut[named.name] = detail::names_of_parameters(*optimizer, layouts);
  }
  return cut;
}

/// Returns for each part that is cut on any rank whether all ranks have the same parameters.
std::map<std::string, bool> join_cut_parts(const std::vector<std::string>& by_rank) {
  std::map<std::string, bool> parts;
  std::map<std::string, std::string> names;
  for (const auto& text : by_rank) {
    const auto entries = unpacked(text);
    for (size_t i = 0; i + 1 < entries.size(); i += 2) {
      const auto& known = names.emplace(entries[i], entries[i + 1]).first->second;
      const auto alike = parts.emplace(entries[i], true).first;
      alike->second = alike->second && known == entries[i + 1];
    }
  }
  return parts;
}

void divide(CheckpointedRun& run, const std::map<std::string, bool>& cut) {
  const auto is_cut_model = [&](const NamedPart& named) {
    return !named.is_per_rank && named.part->module() != nullptr && cut.count(named.name) > 0;
  };
  const auto first_cut =
      std::stable_partition(run.parts.begin(), run.parts.end(), std::not_fn(is_cut_model));
  for (auto named = first_cut; named != run.parts.end(); ++named) {
    run.sharded.add(sharded_part_of(*named));
    run.cut_models.push_back(*named);
  }
  run.parts.erase(first_cut, run.parts.end());
  for (auto& named : run.parts) {
    const auto found = cut.find(named.name);
    if (found == cut.end() || named.is_per_rank || named.part->optimizer() == nullptr) continue;
    if (!run.sharded.contains(named.name)) {
      DDP_CHECK_VALUE(
          named.part->has_named_state(),
          "Checkpointer: expected one of LibTorch's Adam, AdamW, SGD, RMSprop and Adagrad for "
          "parameters that are cut over the ranks, got another optimizer for \"",
          named.name, "\". Add it by add_per_rank(), which loads on as many ranks.");
      const auto part =
          std::make_shared<CutOptimizerPart>(named.part, [&run] { return layouts_in(run); });
      run.sharded.add(sharded_part_of(named.name, part));
      named.part = part;
    }
    auto& part = dynamic_cast<CutOptimizerPart&>(*named.part);
    part.set_alike(found->second);
  }
}

}  // namespace

std::string divide_cut_parts(CheckpointedRun& run, const std::string& doing) {
  std::vector<std::string> own;
  const auto misfit = problem_of([&] {
    check_optimizers(run);
    for (auto& [name, parameters] : find_cut_parts(run)) {
      own.push_back(name);
      own.push_back(parameters);
    }
  });
  const auto cut = join_cut_parts(run.peers.gather(packed(own), doing));
  return misfit.empty() ? problem_of([&] { divide(run, cut); }) : misfit;
}

}  // namespace ddp
