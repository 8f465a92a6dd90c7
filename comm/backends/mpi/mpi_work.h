#pragma once

#include <exception>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

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

}  // namespace ddp::backends::mpi
