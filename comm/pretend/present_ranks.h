// The ranks of a pretended job that are processes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/environment.h"

namespace ddp {

/// A rank of a job whose other ranks need not exist.
struct PretendedRank {
  int rank = 0;
  int world_size = 1;
  std::vector<int> present;  // the ranks that are processes; ascending

  bool is_present(int other) const;
  /// "0,7,512".
  std::string present_text() const;
};

/// Reads DDP_PRETEND, which ddprun --pretend sets.
///
/// \param rank, world_size  of the options; -1: the environment's.
/// \return  nothing if it is not set.
/// \throws c10::ValueError  if it names no ranks of the job, or not this one.
std::optional<PretendedRank> read_pretended_rank(
    const Lookup& lookup, int rank = -1, int world_size = -1);

}  // namespace ddp
