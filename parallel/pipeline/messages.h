#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pipeline/message_header.h"
#include "pipeline/schedule.h"

namespace ddp {

/// The messages of a rank in one step. Sends are asynchronous, because two ranks that waited for
/// sends to each other would never receive.
///
/// Tensors go as bytes, so that each dtype that exists can be sent over each backend. A message is
/// a header and the bytes of each tensor, under one tag, because those arrive in order.
class StageMessages {
 public:
  /// \param monitor  of the group.
  /// \param device  of received tensors.
  StageMessages(
      const ProcessGroup& group, const std::shared_ptr<GroupMonitor>& monitor, at::Device device);

  /// Starts to send, and keeps the memory.
  ///
  /// \param action  that made `tensors`.
  void send(
      const Action& action, const PipelineMessage& message, int64_t stage,
      const std::vector<at::Tensor>& tensors);

  struct Received {
    StageMessageHeader header;
    std::vector<at::Tensor> tensors;
  };
  /// Waits for a message.
  ///
  /// \param action  that needs it.
  /// \param stage  that sends it.
  Received receive(
      const Action& action, const PipelineMessage& message, int64_t stage, WaitPoint where);

  /// Waits until what `action` sent has been received, and drops its memory.
  void finish(const Action& action, WaitPoint where);
  /// The same for all that was sent.
  void finish_all();

 private:
  struct Sent {
    Action action;
    int64_t peer;
    int64_t stage;
    std::vector<at::Tensor> memory;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
  };

  void start(Sent& sent, const at::Tensor& bytes, int64_t tag);
  void receive_into(at::Tensor& memory, const PipelineMessage& message, WaitPoint where);
  void wait(Sent& sent, WaitPoint where);
  std::vector<int64_t> receive_words(
      int64_t count, const PipelineMessage& message, WaitPoint where);

  const ProcessGroup group_;
  const std::shared_ptr<GroupMonitor> monitor_;
  const at::Device device_;
  const at::Device header_device_;
  std::vector<Sent> sent_;
};

}  // namespace ddp
