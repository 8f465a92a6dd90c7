#pragma once

#include <cstddef>
#include <vector>

#include <ddp/reduction_stats.h>

namespace ddp {

/// The times of one rank in one step that it computes by itself, in ms: without waits for others.
struct RankTimes {
  double data = 0;      // from the end of the step before to forward
  double forward = 0;   // to the begin of backward
  double backward = 0;  // of autograd's work

  double sum() const { return data + forward + backward; }
};

/// The numbers of a RankTimes, in the order of its members.
constexpr size_t kTimesOfRank = 3;

/// The times of all ranks in one step; index = rank.
using TimesOfRanks = std::vector<RankTimes>;

/// The rows that find_stragglers() looks at.
constexpr size_t kStragglerRows = 80;

/// Finds the ranks that are slower than the others in the last 20 rows, or in the last 40 or 80
/// where steps differ more: by the median of the other ranks, and by more than chance explains.
///
/// A rank that takes 1.2 times as long is found within 20 rows or a few more, where the times of a
/// step scatter by up to 5%, and within 80 where they scatter by 10%. Where all ranks are alike, it
/// names one in less than one of 10^5 rows, also where times scatter by half, or steps last ten
/// times as long now and then.
///
/// \param rows  oldest first, each of as many ranks, with times above 0; the last kStragglerRows
///        count.
/// \return  by rank.
std::vector<Straggler> find_stragglers(const std::vector<TimesOfRanks>& rows);

}  // namespace ddp
