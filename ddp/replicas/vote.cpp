#include "replicas/vote.h"

#include <map>

#include <ATen/core/functional.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

using RanksByValue = std::map<std::string, std::vector<int>>;

RanksByValue ranks_by_value(const std::vector<Ballot>& ballots, size_t i) {
  RanksByValue ranks;
  for (size_t rank = 0; rank < ballots.size(); ++rank) {
    ranks[ballots[rank].values.at(i)].push_back(static_cast<int>(rank));
  }
  return ranks;
}

std::string with_hosts(const std::vector<int>& ranks, const std::vector<Ballot>& ballots) {
  return joined_by(", ", c10::fmap(ranks, [&](int rank) {
                     const auto& ballot = ballots[static_cast<size_t>(rank)];
                     return describe_rank(rank, ballot.job_rank, ballot.host);
                   }));
}

}  // namespace

Verdict vote(const std::vector<Ballot>& ballots) {
  for (size_t i = 0; i < ballots.front().values.size(); ++i) {
    const auto ranks = ranks_by_value(ballots, i);
    if (ranks.size() == 1) continue;
    Verdict verdict;
    for (const auto& [value, equal] : ranks) {
      verdict.is_decided = verdict.is_decided || 2 * equal.size() > ballots.size();
    }
    for (size_t rank = 0; rank < ballots.size(); ++rank) {
      const auto equal = ranks.at(ballots[rank].values[i]).size();
      const bool is_right = 2 * equal > ballots.size();
      if (!is_right) verdict.wrong.push_back(static_cast<int>(rank));
    }
    return verdict;
  }
  return {{}, true};
}

std::string describe(const Verdict& verdict, const std::vector<Ballot>& ballots) {
  const auto ranks = with_hosts(verdict.wrong, ballots);
  if (!verdict.is_decided) {
    return ddp::str(
        "No majority of the ", ballots.size(),
        " ranks is equal, so that any of them may be wrong: ", ranks, ".");
  }
  const auto right = ballots.size() - verdict.wrong.size();
  return ddp::str(
      "By vote wrong: ", ranks, "; the other ", right, " of ", ballots.size(),
      " ranks are equal to the bit.");
}

std::string describe_rank(int rank, int job_rank, const std::string& host) {
  std::vector<std::string> more;
  if (job_rank != rank) more.push_back(ddp::str("rank ", job_rank, " of the job"));
  if (!host.empty()) more.push_back("host " + host);
  const auto text = ddp::str("rank ", rank);
  return more.empty() ? text : ddp::str(text, " (", joined_by(", ", more), ")");
}

std::string text_of(const Ballot& ballot) {
  return packed({packed(ballot.values), ballot.host, std::to_string(ballot.job_rank)});
}

Ballot ballot_of(const std::string& text) {
  const auto parts = unpacked(text);
  return {unpacked(parts.at(0)), parts.at(1), std::stoi(parts.at(2))};
}

}  // namespace ddp
