#pragma once

#include <string>

#include <ddp/process_group_options.h>

#include "base/deadline.h"
#include "base/environment.h"

namespace ddp {

struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  /// Rank 0's host, as the other ranks spell it. Empty if the store has no host.
  std::string host;
  /// The host of the store, for messages: "which rank 0 hosts at 10.0.0.1 port 29500".
  std::string store_host;
  /// The rank whose process hosts the store; -1: none of them, or unknown.
  int hosting_rank = -1;
};

/// Determines rank, world size and a store that reaches all ranks. Does not wait for the ranks.
///
/// Rank 0's store listens on all addresses of its host; if its address is a loopback address
/// ("localhost", 127.x.y.z, ::1), on that one alone.
///
/// \throws c10::ValueError  on a missing or malformed setting, naming it, its value and the remedy;
///         on variables of other processes without this one's number.
/// \throws c10::Error  if the port is taken, rank 0's host does not resolve or is not this one on
///         rank 0, or rank 0 does not answer before the deadline.
Rendezvous rendezvous(
    const ProcessGroupOptions& options, const Environment& environment, const Deadline& deadline);

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
