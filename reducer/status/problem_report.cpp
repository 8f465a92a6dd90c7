#include "status/problem_report.h"

#include <map>
#include <utility>

#include <ATen/core/functional.h>
#include <ddp/internal/join_names.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

// The texts of problems, as they are sent to the other ranks: a description and a remedy for each.
using Texts = std::vector<std::string>;

Texts texts_of(const std::vector<Problem>& problems, size_t all) {
  Texts texts;
  for (const auto& p : problems) texts.insert(texts.end(), {describe_problem(p, all), p.remedy});
  return texts;
}

std::string on_ranks_text(const std::vector<size_t>& ranks, size_t world) {
  if (ranks.size() == world && world > 1) return " on every rank";
  return ddp::str(" on ", ranks_text(ranks), " of ", world);
}

std::string describe(const std::vector<Texts>& by_rank) {
  struct Distinct {
    std::string what, remedy;
    std::vector<size_t> ranks;
  };
  std::vector<Distinct> distinct;  // in order of their first rank
  std::map<std::string, size_t> place;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto& texts = by_rank[rank];
    for (size_t i = 0; i + 1 < texts.size(); i += 2) {
      const auto [at, is_new] = place.emplace(texts[i], distinct.size());
      if (is_new) distinct.push_back({texts[i], texts[i + 1], {}});
      auto& ranks = distinct[at->second].ranks;
      if (ranks.empty() || ranks.back() != rank) ranks.push_back(rank);
    }
  }
  std::string text;
  for (size_t i = 0; i < distinct.size() && i < kMostProblems; ++i) {
    const auto& [what, remedy, ranks] = distinct[i];
    if (!text.empty()) text += '\n';
    text += "Reducer: " + what + on_ranks_text(ranks, by_rank.size()) + ". " + remedy;
  }
  if (distinct.size() > kMostProblems) {
    text += ddp::str("\nand ", distinct.size() - kMostProblems, " more problems.");
  }
  return text;
}

}  // namespace

void add_problem(std::vector<Problem>& problems, Problem problem) {
  if (problem.parameters.empty()) {
    problems.push_back(std::move(problem));
    return;
  }
  auto& names = problem.parameters;
  Problem* alike = nullptr;
  for (auto& p : problems) {
    drop_if(names, [&](const std::string& name) { return contains(p.parameters, name); });
    const bool same = p.what == problem.what && p.remedy == problem.remedy && p.why == problem.why;
    if (same && !p.parameters.empty()) alike = &p;
  }
  if (names.empty()) return;
  if (alike) {
    alike->parameters.insert(alike->parameters.end(), names.begin(), names.end());
  } else {
    problems.push_back(std::move(problem));
  }
}

std::string describe_problem(const Problem& problem, size_t all) {
  const auto count = problem.parameters.size();
  if (count == 0) return problem.what;
  return ddp::str(
      problem.what, " for ", count, " of ", all, all == 1 ? " parameter (" : " parameters (",
      join_names(problem.parameters), problem.why.empty() ? "" : ": ", problem.why, ")");
}

std::string describe_problems(const std::vector<std::vector<Problem>>& by_rank, size_t all) {
  return describe(
      c10::fmap(by_rank, [all](const auto& problems) { return texts_of(problems, all); }));
}

std::string gather_problems(
    const std::vector<Problem>& mine, size_t all, const ProcessGroup& group, WaitForWork wait) {
  return describe(c10::fmap(gather_strings(packed(texts_of(mine, all)), group, wait), unpacked));
}

}  // namespace ddp
