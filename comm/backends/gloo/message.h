// Messages of one rank to another over Gloo: their format, and their handle.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

#include <ATen/core/Tensor.h>
#include <ddp/internal/owner_process.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backends/message_check.h"

namespace ddp::backends {

// Gloo compares nothing: a message shorter than the buffer fills a part of it, and a longer one
// makes Gloo throw on its own thread, which ends the process.
//
// So each message begins with a packet of limited size, which holds a MessageHeader and, for a
// short message, the elements. The elements of a long message are a second message with the tag
// elements_tag(), so that they cannot arrive in memory of another size. The receiver knows that tag
// in advance and posts the receive before the elements come.

/// Whether a tensor's elements fit into the packet. A copy of 64 KiB costs less than a second
/// message.
bool fits_in_packet(const at::Tensor& tensor);

/// The tag of a long message's elements. It differs for each dtype, size and tag of the message.
int elements_tag(const at::Tensor& tensor, int tag);

/// \param tensor  contiguous, on the CPU.
at::Tensor make_packet(const at::Tensor& tensor);

/// Allocates a buffer that is large enough for any packet.
at::Tensor empty_packet();

/// Copies the elements in `packet` to `tensor`, which has the same size.
void copy_elements(const at::Tensor& packet, const at::Tensor& tensor);

MessageHeader header_of(const at::Tensor& packet);

/// A send or receive over Gloo that can be polled, made of one or two works of Gloo's.
///
/// Gloo's own work completes in its wait() only, so that a loop over isCompleted() would never end.
/// Here the first isCompleted() starts a thread that waits. The destructor aborts a transfer that
/// the thread still waits for. A wait() without an isCompleted() before it starts no thread.
class GlooPointToPoint : public c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  /// Waits for a work of Gloo's. \return  whether it has completed, and was not aborted.
  using Wait = std::function<bool(const WorkPtr&)>;
  /// Runs a whole transfer. \return  as Wait.
  using Transfer = std::function<bool(const Wait&)>;

  /// \param first  the work that the transfer waits for first.
  /// \param timeout  of the transfer, for a wait() without a timeout.
  GlooPointToPoint(WorkPtr first, Transfer transfer, std::chrono::milliseconds timeout);
  ~GlooPointToPoint() override;

  /// Continues the transfer in a thread of its own, before wait() is called.
  void start();

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  int sourceRank() const override { return first_->sourceRank(); }
  uint64_t getSequencenumber() const override { return first_->getSequencenumber(); }

 private:
  /// Returns true for the first caller, which must finish the transfer.
  bool claim();
  void finish_transfer(std::chrono::milliseconds timeout);
  bool wait_for(const WorkPtr& work, std::chrono::milliseconds timeout);

  const OwnerProcess owner_;
  const WorkPtr first_;
  const std::chrono::milliseconds timeout_;
  Transfer transfer_;     // until it is over
  WorkPtr current_;       // the work that the transfer waits for; guarded by mutex_
  bool claimed_ = false;  // guarded by mutex_
  bool aborted_ = false;  // guarded by mutex_
  bool arrived_ = false;  // written before the base class is completed, read after
  std::thread waiter_;
};

}  // namespace ddp::backends
