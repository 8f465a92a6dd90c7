#include "full/whole_tensors.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include <ATen/core/grad_mode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/prepared_load.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

/// Stages of a model have other parameters, and so other buffers. Ranks with the same cut
/// parameters have the same model.
void check_same_names(
    const std::string& function, const std::vector<std::vector<std::string>>& whole,
    const std::vector<std::set<std::string>>& cut) {
  for (size_t rank = 1; rank < whole.size(); ++rank) {
    const auto alike = std::find(cut.begin(), cut.end(), cut[rank]);
    const auto first = static_cast<size_t>(alike - cut.begin());
    const auto missing = names_without(whole[first], whole[rank]);
    const auto additional = names_without(whole[rank], whole[first]);
    std::string text;
    if (!missing.empty()) text = ddp::str("lacks rank ", first, "'s ", quoted_names(missing));
    if (!additional.empty()) {
      text += ddp::str(text.empty() ? "has " : ", and has ", quoted_names(additional), " besides");
    }
    DDP_CHECK_VALUE(
        text.empty(), function,
        ": expected every rank to have the same parameters and buffers, but rank ", rank, " of ",
        whole.size(), " ", text, ". Build the same model on every rank.");
  }
}

}  // namespace

OwnParts own_parts_of(const torch::nn::Module& module, Values values) {
  const at::NoGradGuard no_grad;
  OwnParts own;
  std::map<size_t, std::pair<std::string, std::string>> by_place;
  for (const auto& [names, places, tensor, value, layout] : tensors_of_module(module)) {
    for (size_t i = 0; i < names.size(); ++i) by_place[places[i]] = {names[i], names[0]};
    const TensorKind kind{tensor.scalar_type(), layout.sizes};
    if (layout.sharded_over.empty()) own.whole.push_back(names[0]);
    const auto views = views_of_boxes(layout, values == Values::ToSave ? value : tensor);
    for (size_t i = 0; i < views.size(); ++i) {
      DDP_CHECK_VALUE(
          is_within(layout.boxes[i], layout.sizes), "ParameterLayout: expected boxes within ",
          at::IntArrayRef(layout.sizes), " for ", layout.name, ", got ", box_text(layout.boxes[i]),
          ". Correct its layouts().");
      own.parts.push_back({names[0], layout.boxes[i], views[i]});
      own.layouts.push_back({names[0], kind, layout.boxes[i], 0, layout.stage});
    }
    if (views.empty() && !layout.sizes.empty()) {
      const std::vector<int64_t> none(layout.sizes.size(), 0);
      own.layouts.push_back({names[0], kind, {none, none}, 0, layout.stage});
    }
  }
  for (auto& item : by_place) own.names.push_back(std::move(item.second));
  return own;
}

std::string to_text(const OwnParts& own) {
  std::vector<std::string> names;
  for (const auto& [name, first] : own.names) {
    names.push_back(name);
    names.push_back(first);
  }
  return packed({to_text(RankLayouts{{"", own.layouts}}), packed(own.whole), packed(names)});
}

WholeTensors whole_tensors(const std::string& function, const std::vector<std::string>& by_rank) {
  WholeTensors all;
  std::vector<std::vector<std::string>> whole, names;
  for (const auto& text : by_rank) {
    const auto texts = unpacked(text);
    all.ranks.push_back(std::move(layouts_from(texts.at(0))[""]));
    whole.push_back(unpacked(texts.at(1)));
    names.push_back(unpacked(texts.at(2)));
  }
  std::vector<std::set<std::string>> cut;
  for (size_t rank = 0; rank < whole.size(); ++rank) {
    auto& names_of_rank = cut.emplace_back();
    for (const auto& layout : all.ranks[rank]) names_of_rank.insert(layout.name);
    for (const auto& name : whole[rank]) names_of_rank.erase(name);
  }
  check_same_names(function, whole, cut);
  number_copies(all.ranks);
  const auto kinds = tensors_of({function, ""}, all.ranks);
  std::unordered_map<std::string, size_t> number;
  std::set<std::string> named;
  for (const auto& of_rank : names) {
    for (size_t i = 0; i + 1 < of_rank.size(); i += 2) {
      const auto& first = of_rank[i + 1];
      const auto kind = kinds.find(first);
      if (kind == kinds.end() || !named.insert(of_rank[i]).second) continue;
      const auto [place, is_new] = number.emplace(first, all.tensors.size());
      if (is_new) all.tensors.push_back({first, kind->second});
      all.names.emplace_back(of_rank[i], place->second);
    }
  }
  return all;
}

std::string first_problem(const std::vector<std::string>& by_rank) {
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank].empty()) continue;
    return ddp::str(by_rank[rank], " (rank ", rank, " of ", by_rank.size(), ")");
  }
  return "";
}

}  // namespace ddp
