// The records of failures that the ranks of a job write into its store.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

/// Records why the job failed, unless a reason is recorded already.
///
/// \return the recorded reason.
std::string record_failure(c10d::Store& store, const std::string& why);
std::optional<std::string> read_failure(c10d::Store& store);

/// Records that `rank` has read the failure.
void record_reader(c10d::Store& store, int rank);
/// Whether all of `ranks` have read the failure.
bool have_read(c10d::Store& store, const std::vector<int>& ranks);

/// A forward pass that threw on one rank.
struct FailedAttempt {
  int rank = -1;
  uint64_t number = 0;  // of the rank's attempts in that group, from 1
  std::string group;    // its key
  std::string why;
};

/// Appends `attempt` to the job's list in `store`, unless another rank's with that number is there:
/// an attempt that fails on all ranks makes one entry, in a world of any size.
void record_attempt(c10d::Store& store, const FailedAttempt& attempt);

/// Appends the entries that are new to `known`, which holds the beginning of the job's list.
///
/// Cost: one request to the store while the list is empty; else two, and two for each new entry.
void read_attempts(c10d::Store& store, std::vector<FailedAttempt>& known);

}  // namespace ddp
