#pragma once

#include <string>
#include <vector>

namespace ddp {

/// The result of a vote of ranks that ought to have the same values.
struct Verdict {
  /// In rising order: those outside of the majority; without one, all of them.
  std::vector<int> wrong = {};
  bool is_decided = false;
};

/// The values of a rank, and its host.
struct Ballot {
  /// Texts that are equal where the values are; the first one in which ranks differ counts.
  std::vector<std::string> values = {};
  std::string host = {};
  int job_rank = 0;  // its number in the job, which may have other ranks beside the voting group
};

/// Lets more than half of the ranks outvote the others; no rank is wrong where all are equal.
///
/// \param ballots  by rank.
Verdict vote(const std::vector<Ballot>& ballots);

/// Says in two sentences which ranks are wrong, with their hosts; the same on every rank.
std::string describe(const Verdict& verdict, const std::vector<Ballot>& ballots);

/// "rank 2 (host a)", or "rank 2 (rank 9 of the job, host a)" in a part of the job.
///
/// \param host  "": not named.
std::string describe_rank(int rank, int job_rank, const std::string& host = "");

std::string text_of(const Ballot& ballot);
/// \param text  of text_of().
Ballot ballot_of(const std::string& text);

}  // namespace ddp
