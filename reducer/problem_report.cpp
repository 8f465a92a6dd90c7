#include "problem_report.h"

#include <map>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>
#include <ddp/internal/gather_strings.h>

namespace ddp {
namespace {

std::string serialize(const std::vector<Problem>& problems) {
  std::string text;
  for (const auto& p : problems) text += p.what + '\t' + p.remedy + '\n';
  return text;
}

std::vector<Problem> parse_problems(const std::string& text) {
  std::vector<Problem> problems;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto tab = line.find('\t');
    problems.push_back({line.substr(0, tab), line.substr(tab + 1)});
  }
  return problems;
}

std::string ranks_text(const std::vector<size_t>& ranks, size_t world) {
  if (ranks.size() == world && world > 1) return " on every rank";
  std::string text = ranks.size() == 1 ? " on rank " : " on ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text + " of " + std::to_string(world);
}

}  // namespace

std::string join_names(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kMostNames; ++i) {
    if (i > 0) text += ", ";
    text += names[i];
  }
  if (names.size() > kMostNames) {
    text += " and " + std::to_string(names.size() - kMostNames) + " more";
  }
  return text;
}

std::string describe_problems(const std::vector<std::vector<Problem>>& by_rank) {
  std::vector<std::pair<Problem, std::vector<size_t>>> distinct;  // in order of first sight
  std::map<std::string, size_t> place;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const auto& problem : by_rank[rank]) {
      const auto [at, is_new] = place.emplace(problem.what, distinct.size());
      if (is_new) distinct.push_back({problem, {}});
      auto& ranks = distinct[at->second].second;
      if (ranks.empty() || ranks.back() != rank) ranks.push_back(rank);
    }
  }
  std::string text;
  for (const auto& [problem, ranks] : distinct) {
    if (!text.empty()) text += '\n';
    text += "Reducer: " + problem.what + ranks_text(ranks, by_rank.size()) + ". " + problem.remedy;
  }
  return text;
}

std::string gather_problems(
    const std::vector<Problem>& mine, const ProcessGroup& group, WaitForWork wait) {
  std::vector<std::vector<Problem>> by_rank;
  for (const auto& text : gather_strings(serialize(mine), group, wait)) {
    by_rank.push_back(parse_problems(text));
  }
  return describe_problems(by_rank);
}

}  // namespace ddp
