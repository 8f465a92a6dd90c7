// The records of failures that the ranks of a job write into its store.
#pragma once

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

/// Records what threw on `rank`, which may leave without recording a failure of the job; "": the
/// rank goes on.
void record_error(c10d::Store& store, int rank, const std::string& why);
/// "rank 3: <what threw>" of each of `ranks` that has recorded it, "; " between them.
std::string read_errors(c10d::Store& store, const std::vector<int>& ranks);

void record_reader(c10d::Store& store, int rank);
bool have_read(c10d::Store& store, const std::vector<int>& ranks);

}  // namespace ddp
