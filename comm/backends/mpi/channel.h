#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "backends/mpi/mpi_calls.h"
#include "backends/mpi/mpi_work.h"

namespace ddp::backends::mpi {

/// After "mpi: ", the error of works of a group that was aborted.
constexpr const char* kAborted =
    "expected a working process group, but it was aborted, by abort() or after a failure that was "
    "reported before. Make a new group";

/// The communicators of a group, and whether it still works.
///
/// MPI cannot give up a message. So after a failure the works are completed with the error, while
/// the messages stay with MPI, and their memory with the MPI thread, until the process ends.
///
/// Thread safety: fail(), has_failed(), add() and remove(). The rest is the MPI thread's.
class Channel {
 public:
  Channel(int rank, int size) : rank(rank), size(size), sent(static_cast<size_t>(size)) {}

  const int rank;
  const int size;

  MPI_Comm collectives = MPI_COMM_NULL;
  MPI_Comm messages = MPI_COMM_NULL;  // the envelopes of send and recv, with the user's tags
  MPI_Comm elements = MPI_COMM_NULL;  // of long messages, with tags of their own
  std::vector<uint64_t> sent;         // how many messages, by receiver
  std::set<uint64_t> under_way;       // collectives, by number

  /// Completes all works, and those that are added later, with an error.
  ///
  /// \param what  follows "mpi: "; no full stop.
  void fail(const std::string& what) noexcept;
  bool has_failed() const { return has_failed_; }

  /// \throws c10::DistBackendError  after fail().
  void add(const c10::intrusive_ptr<MpiWork>& work);
  void remove(const c10::intrusive_ptr<MpiWork>& work);

 private:
  std::atomic<bool> has_failed_{false};
  std::mutex mutex_;  // guards the rest
  std::string failure_;
  std::unordered_set<c10::intrusive_ptr<MpiWork>> pending_;
};

}  // namespace ddp::backends::mpi
