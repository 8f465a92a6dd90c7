#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "monitor/failure_records.h"

namespace ddp {

/// Numbers the attempts of one group on this rank: the forward passes that all its ranks begin.
///
/// Attempts are numbered by averaged pass, and within it. Threads: all members, from any thread.
class Attempts {
 public:
  /// \param group  the key of the group; differs between the groups of a job.
  explicit Attempts(std::string group) : group_(std::move(group)) {}

  void begin();
  /// Ends an averaged pass. All ranks restart their count here, because they may have had different
  /// numbers of forward passes before it (in a join).
  void end_pass();
  /// Records that the current attempt failed here, and returns its record for the other ranks.
  FailedAttempt fail(int rank, const std::string& why);

  uint64_t count() const;
  /// Whether a rank's failed attempt keeps this rank waiting for it: this rank has begun it, or a
  /// later one, and it did not fail here as well.
  bool concerns_this_rank(const FailedAttempt& attempt) const;

 private:
  const std::string group_;
  mutable std::mutex mutex_;  // guards the members below
  uint64_t count_ = 0;
  std::vector<uint64_t> failed_;
};

}  // namespace ddp
