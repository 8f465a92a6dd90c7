#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backends/mpi/mpi_calls.h"

namespace ddp::backends::mpi {

class Channel;

/// The handle of a collective or a message over MPI.
class MpiWork : public c10d::Work {
 public:
  /// \param outputs  the tensors that result() and the future return.
  MpiWork(
      std::shared_ptr<Channel> channel, int rank, c10d::OpType type, const char* title,
      std::vector<at::Tensor> outputs);

  /// Completes the handle. Later calls do nothing. Callbacks on the future run on a thread for
  /// them, so that they cannot hold up MPI's.
  void complete(const std::exception_ptr& error) noexcept;

  /// \param source  of a message that is over.
  void set_source(int source) { source_ = source; }

  void abort() override;
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void complete_future() noexcept;

  const std::shared_ptr<Channel> channel_;
  const std::vector<at::Tensor> outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  int source_ = -1;
  // Guarded by mutex_:
  bool is_over_ = false;     // complete() was called
  bool is_settled_ = false;  // it completes the future only if it is used already
  bool is_future_used_ = false;
};

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
