#include "zero/checks.h"

#include <unordered_map>
#include <unordered_set>

#include <c10/util/accumulate.h>
#include <ddp/internal/check.h>
#include <ddp/parameter_layout.h>

namespace ddp {
namespace {

using State = DistributedDataParallelBase::State;

/// An optimizer would take each rank's part for the whole.
void check_whole(const std::vector<torch::optim::OptimizerParamGroup>& groups, const State& model) {
  std::unordered_set<const void*> given;
  for (const auto& group : groups) {
    for (const auto& p : group.params()) given.insert(p.unsafeGetTensorImpl());
  }
  for (const auto& layout : layouts_of(model.wrapped())) {
    const bool is_whole = layout.local.numel() == c10::multiply_integers(layout.sizes);
    DDP_CHECK_VALUE(
        is_whole || given.count(layout.local.unsafeGetTensorImpl()) == 0,
        "ZeroRedundancyOptimizer: expected whole parameters for an optimizer that needs them "
        "(Muon, LAMB), got \"",
        layout.name, "\", of which each rank has a part, on ", model.monitor().rank_text(),
        ". Step it with another optimizer, or with ddp::optim::Muon(*model).");
  }
}

}  // namespace

const ZeroOptions& checked(
    const ZeroOptions& options, const detail::ZeroKind& kind, const State& model) {
  constexpr const char* kSubject = "ZeroRedundancyOptimizer: ";
  DDP_CHECK_VALUE(
      options.stage() == 1 || options.stage() == 2, kSubject, "expected stage 1 or 2, got ",
      options.stage(), ". 1 divides the state, 2 gradients as well.");
  DDP_CHECK_VALUE(
      options.stage() == 1 || !kind.needs_whole_tensors, kSubject,
      "expected stage 1 of an optimizer that needs whole parameters (Muon, LAMB), since stage 2 "
      "cuts gradients within parameters, got stage 2. Set stage(1), or take a fully sharded model "
      "with ddp::optim::Muon(*model).");
  const auto group = options.process_group().given();
  const bool is_models = !group || group == model.group();
  DDP_CHECK_VALUE(
      is_models || (options.stage() == 1 && !options.overlap()), kSubject,
      "expected the model's process group with stage 2 or overlap, got another one. Leave "
      "process_group out.");
  DDP_CHECK_VALUE(
      !options.offload_file() || !options.offload_file()->empty(), kSubject,
      "expected offload_file() to name a file that can be made, got \"\". Give a path in a folder "
      "of a local disk, such as \"/scratch/state\", or leave it out.");
  return options;
}

void check_parameters(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, const detail::ZeroKind& kind,
    const State& model) {
  if (kind.needs_whole_tensors) check_whole(groups, model);
  std::unordered_map<const void*, const NamedParameter*> known;
  for (const auto& p : model.reducer().parameters()) known[p.tensor.unsafeGetTensorImpl()] = &p;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto found = known.find(parameters[i].unsafeGetTensorImpl());
      DDP_CHECK_VALUE(
          found != known.end() || !parameters[i].requires_grad(),
          "ZeroRedundancyOptimizer: expected parameters of the model, whose gradients it averages, "
          "got another one: parameter ",
          i, " of group ", g, " on ", model.monitor().rank_text(),
          ". Step it with an optimizer of its own, or call model->refresh() before.");
      DDP_CHECK_VALUE(
          found == known.end() || !found->second->expect_sparse,
          "ZeroRedundancyOptimizer: expected parameters with dense gradients, got \"",
          found->second->name,
          "\", whose are sparse. Make the Embedding with sparse(false), or step it with an "
          "optimizer of its own.");
    }
  }
}

}  // namespace ddp
