// What threads that wait for messages between stages share.
#pragma once

#include <chrono>
#include <mutex>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pipeline/message_header.h"

namespace ddp {

/// Whether threads transfer the messages: those in host memory. On a device its streams do.
bool has_transfer_threads(at::Device of_tensors, at::Device of_headers);

/// The waits of a thread for messages, one after the other. They have no limit of their own: that
/// of the computing thread's wait for the thread begins later.
class TransferWait {
 public:
  /// Waits for the end of a message.
  ///
  /// \throws  where it is lost, and after end().
  void wait(const c10::intrusive_ptr<c10d::Work>& work);
  /// Ends the wait, and later ones: Gloo forgets a send whose connection breaks while it writes,
  /// and then an aborted group does not end the wait for it.
  void end() noexcept;

 private:
  std::mutex mutex_;  // guards the members below
  c10::intrusive_ptr<c10d::Work> current_;
  bool is_over_ = false;
};

/// The other half: the computing thread's wait for such a thread, for at most the group's timeout.
///
/// \param is_over  itself blocks for at most the time that it is passed.
/// \throws c10::DistBackendError  as GroupMonitor::wait().
void wait_for_thread(
    GroupMonitor& monitor, const ProcessGroup& group,
    c10::function_ref<bool(std::chrono::milliseconds)> is_over, WaitPoint where);

/// Whether anything is sent for a tensor.
bool has_bytes(const TensorDescription& tensor);

}  // namespace ddp
