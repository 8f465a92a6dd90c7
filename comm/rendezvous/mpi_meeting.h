#pragma once

#include <string>

#include "base/deadline.h"

namespace ddp {

/// How ranks that MPI has started meet, without an address: for init_method("mpi://").
class MpiMeeting {
 public:
  virtual ~MpiMeeting() = default;

  struct Place {
    int rank = 0;
    int world_size = 1;
  };
  /// Starts MPI, if it is not running.
  ///
  /// \throws c10::Error  if MPI cannot start, or says something else than its launcher.
  virtual Place start(const Deadline& deadline) = 0;

  /// Sends a text of rank 0 to all ranks.
  ///
  /// \throws c10::Error  after the deadline.
  ///
  /// Collective: yes. Blocks: host.
  virtual std::string broadcast(const std::string& text, const Deadline& deadline) = 0;
};

/// Set by ddp::mpi where a program is linked with it; null elsewhere.
MpiMeeting*& mpi_meeting();

}  // namespace ddp
