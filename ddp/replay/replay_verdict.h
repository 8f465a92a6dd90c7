#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddp {

/// Hashes of what the forward and the backward pass of a micro-batch make.
struct ReplayHashes {
  uint64_t outputs = 0;
  uint64_t gradients = 0;

  bool operator==(const ReplayHashes& other) const {
    return outputs == other.outputs && gradients == other.gradients;
  }
};

/// A rank's micro-batch, computed by that rank, the next one, and the one after that.
struct ReplayedBatch {
  ReplayHashes own, by_next, by_third;

  bool is_disputed() const { return !(own == by_next); }
};

/// The result of a replayed pass.
struct ReplayVerdict {
  std::string text = {};        // "": no dispute
  std::vector<int> wrong = {};  // in rising order; none where no rank can be blamed
};

/// Decides by the third rank; of two ranks both may be wrong. Where several ranks' batches are all
/// disputed, the program does not repeat itself.
///
/// \param batches  by the rank whose they are; `by_third` only of three ranks and more.
/// \param hosts  names, by rank of the group. \param job_ranks  numbers in the job, likewise.
ReplayVerdict judge(
    const std::vector<ReplayedBatch>& batches, const std::vector<std::string>& hosts,
    const std::vector<int>& job_ranks);

}  // namespace ddp
