#include "pipeline/tied.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/functional.h>
#include <c10/core/GradMode.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/text.h>

#include "pipeline/messages/message_header.h"

namespace ddp {
namespace {

struct TiedText {
  std::string group;  // its name, which all its ranks know it by
  int64_t ranks = 0;  // of the group
  int64_t stage = 0;
  std::string kind;  // "[512, 64] Float"
};

std::string text_of_tied(const TiedText& tied) {
  return packed({tied.group, std::to_string(tied.ranks), std::to_string(tied.stage), tied.kind});
}

/// The parameters that are tied over one group, by rank of the pipeline. A rank may have several
/// that are tied over the same group: the i-th of each rank are copies.
using Copies = std::map<size_t, TiedText>;

std::map<std::pair<std::string, size_t>, Copies> copies_in(
    const std::vector<std::string>& by_rank) {
  std::map<std::pair<std::string, size_t>, Copies> copies;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    std::map<std::string, size_t> count;
    for (const auto& text : unpacked(by_rank[rank])) {
      const auto fields = unpacked(text);
      const TiedText tied{fields[0], std::stoll(fields[1]), std::stoll(fields[2]), fields[3]};
      copies[{tied.group, count[tied.group]++}].emplace(rank, tied);
    }
  }
  return copies;
}

int64_t stage_with(
    const at::Tensor& parameter, const std::vector<detail::StageModule>& chunks,
    const PipelineShape& shape, int64_t rank) {
  for (size_t c = 0; c < chunks.size(); ++c) {
    for (const auto& p : chunks[c].module->parameters()) {
      if (p.is_same(parameter)) return shape.stage_of(rank, static_cast<int64_t>(c));
    }
  }
  return -1;
}

/// Whether the copies take gradients.
///
/// \throws c10::Error  on all ranks of the group, where some do.
///
/// Collective: over the group.
bool takes_gradients(const TiedParameter& tied) {
  const auto& group = tied.group;
  const auto options = at::dtype(at::kLong).device(carrier_device(*group));
  auto count = at::full({1}, tied.parameter.requires_grad() ? 1 : 0, options);
  all_reduce(count, c10d::ReduceOp::SUM, group);
  const auto trained = count.item<int64_t>();
  DDP_CHECK(
      trained == 0 || trained == group->getSize(),
      "PipelineStage: expected all copies of a TiedParameter to require a gradient, or none, got ",
      trained, " that do of ", group->getSize(), " ", on_rank_text(*group),
      ". Freeze them on all their stages.");
  return trained > 0;
}

}  // namespace

TiedParameters::TiedParameters(
    std::vector<TiedParameter> tied, const std::vector<detail::StageModule>& chunks,
    const PipelineShape& shape, int64_t rank)
    : tied_(std::move(tied)) {
  std::vector<std::string> texts;
  for (const auto& [parameter, group] : tied_) {
    const auto stage = parameter.defined() ? stage_with(parameter, chunks, shape, rank) : -1;
    DDP_CHECK_VALUE(
        stage >= 0 && group,
        "PipelineStage: expected a TiedParameter with a parameter of the stage's module and the "
        "group of the ranks that have it, got ",
        stage < 0 ? "another tensor" : "no group", " on rank ", rank, " of ", shape.ranks,
        ". Take it from the module that the stage gets, and leave tied() out on ranks without.");
    texts.push_back(text_of_tied(
        {group->getGroupName(), group->getSize(), stage, text_of(description_of(parameter))}));
  }
  text_ = packed(texts);
}

std::string problem_of_tied(const std::vector<std::string>& by_rank) {
  for (const auto& [key, copies] : copies_in(by_rank)) {
    const auto& [first_rank, first] = *copies.begin();
    if (static_cast<int64_t>(copies.size()) != first.ranks) {
      std::vector<size_t> ranks;
      for (const auto& copy : copies) ranks.push_back(copy.first);
      return ddp::str(
          "PipelineStage: expected a TiedParameter on all ", first.ranks,
          " ranks of its group, got it on ", ranks_text(ranks), " of ", by_rank.size(),
          " alone. Declare it on each rank that has it, with a group of these ranks: "
          "ddp::new_group({0, last}, mesh.group(\"pp\")).");
    }
    for (const auto& [rank, copy] : copies) {
      if (copy.kind == first.kind) continue;
      return ddp::str(
          "PipelineStage: expected copies of a TiedParameter with one shape and dtype, got ",
          first.kind, " on rank ", first_rank, " and ", copy.kind, " on rank ", rank, " of ",
          by_rank.size(), ". Build, and wrap, the module that holds it in the same way.");
    }
  }
  return "";
}

void TiedParameters::begin(
    const std::vector<std::string>& by_rank, const ProcessGroup& ranks, StageTensors& places) {
  const c10::NoGradGuard no_grad;
  const auto copies = copies_in(by_rank);
  std::map<std::string, size_t> count;
  for (const auto& [parameter, group] : tied_) {
    const auto& name = group->getGroupName();
    const auto& all = copies.at({name, count[name]++});
    const auto first = std::min_element(
        all.begin(), all.end(),
        [](const auto& one, const auto& other) { return one.second.stage < other.second.stage; });
    places.add(parameter, {first->second.stage, ranks, group});
    auto values = parameter.detach();
    broadcast(values, /*src=*/0, group);
  }
}

std::vector<at::Tensor> TiedParameters::parameters() const {
  return c10::fmap(tied_, [](const auto& tied) { return tied.parameter; });
}

void TiedParameters::sum_gradients(GroupMonitor& monitor) const {
  const c10::NoGradGuard no_grad;
  const auto summing = [] { return std::string("summing the gradients of tied parameters"); };
  monitor.abort_on_error(summing, [&] {
    for (const auto& tied : tied_) {
      if (!takes_gradients(tied)) continue;
      const auto& [parameter, group] = tied;
      auto& gradient = parameter.mutable_grad();
      if (!gradient.defined()) gradient = at::zeros_like(parameter);
      DDP_CHECK(
          gradient.layout() == at::kStrided,
          "PipelineStage: expected a dense gradient of a TiedParameter, got a ", gradient.layout(),
          " one. Make the Embedding with sparse(false).");
      all_reduce(gradient, c10d::ReduceOp::SUM, group);
    }
  });
}

}  // namespace ddp
