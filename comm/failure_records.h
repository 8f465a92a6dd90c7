// What the ranks of a group write into its store about what went wrong.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

/// Records why the group failed, unless that is recorded.
///
/// \return what stands then.
std::string record_failure(c10d::Store& store, const std::string& why);
std::optional<std::string> read_failure(c10d::Store& store);

/// Records that `rank` knows of the failure.
void record_reader(c10d::Store& store, int rank);
/// Whether all of `ranks` have recorded that.
bool have_read(c10d::Store& store, const std::vector<int>& ranks);

/// A forward pass that threw on one rank.
struct FailedAttempt {
  int rank = -1;
  uint64_t number = 0;  // of the rank's attempts, from 1
  std::string why;
};

/// Adds `attempt` to the group's list in `store`, unless another rank's of that number is there:
/// an attempt that fails on all ranks makes one entry, in a world of any size.
void record_attempt(c10d::Store& store, const FailedAttempt& attempt);

/// Adds to `known`, which is the beginning of the group's list, what has come to it since.
///
/// Cost: one request to the store while the list is empty; else two, and two for each new entry.
void read_attempts(c10d::Store& store, std::vector<FailedAttempt>& known);

}  // namespace ddp
