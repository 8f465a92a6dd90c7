// The rows of `costs worlds`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace costs {

/// One operation, at the number of ranks of the world.
struct WorldRow {
  std::string what;
  /// Does it once, and returns what is to live until its time and memory are taken.
  std::function<std::shared_ptr<void>()> run;
};

/// Measures what one rank makes of a group: other groups, wrappers, optimizers, samplers.
std::vector<WorldRow> rows_of_groups(int ranks);

/// Measures what a process makes of the tables of all ranks: of checkpoints, and of an elastic job.
///
/// \param folder  for files, which the caller removes.
std::vector<WorldRow> rows_of_tables(int ranks, const std::string& folder);

/// Operations on the store, of all ranks together.
struct StoreRow {
  std::string what;
  int64_t operations = 0;
  int64_t keys_read = 0;
};

/// Ranks that are threads meet at the startup barrier, over a store that counts.
std::vector<StoreRow> rows_of_store(int ranks);

}  // namespace costs
