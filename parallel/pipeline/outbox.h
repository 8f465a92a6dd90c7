#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pipeline/schedule.h"
#include "pipeline/transfer.h"

namespace ddp {

/// Sends the messages of a rank in a step, and keeps the memory of each until it has arrived. Sends
/// are asynchronous, because two ranks that waited for sends to each other would never receive.
///
/// Tensors go as bytes, so that each dtype that exists can be sent over each backend. A message is
/// a header and the bytes of each tensor, under one tag, because those arrive in order.
class StageOutbox {
 public:
  /// \param monitor  of the group.
  /// \param ranks  what texts call the ranks of the group. Lives longer.
  /// \param device  of the tensors.
  /// \param call  that the messages are of.
  StageOutbox(
      const ProcessGroup& group, const std::shared_ptr<GroupMonitor>& monitor,
      const std::vector<std::string>& ranks, at::Device device, const StageCall& call);
  /// Starts to send.
  ///
  /// \param action  that made `tensors`. \param stage  that it is of.
  /// \param is_filler  as in the header.
  void send(
      const Action& action, const PipelineMessage& message, int64_t stage,
      const std::vector<at::Tensor>& tensors, bool is_filler);

  /// Waits until what `action` sent has arrived, and its memory is dropped.
  void finish(const Action& action);
  /// The same for all that was sent.
  void finish_all();

 private:
  struct Sent {
    Action action;
    int64_t peer = 0;
    int64_t stage = 0;
    std::vector<at::Tensor> memory = {};
    std::vector<c10::intrusive_ptr<c10d::Work>> works = {};
  };

  void start(Sent& sent, const at::Tensor& bytes, int64_t tag) const;
  void drop_arrived();
  void drop_all();
  /// What the first message that has not arrived is.
  std::string text_of_first();
  /// Waits until the first `count` of all messages have arrived.
  void wait_for(size_t count);

  const ProcessGroup group_;
  const std::shared_ptr<GroupMonitor> monitor_;
  const std::vector<std::string>& ranks_;
  const at::Device device_;
  const at::Device header_device_;
  const StageCall call_;
  std::deque<Sent> sent_;  // and not arrived; the thread's lock guards it
  size_t arrived_ = 0;     // the same
  TransferThread dropper_;
};

}  // namespace ddp
