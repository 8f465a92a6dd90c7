#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pipeline/messages/transfer.h"
#include "pipeline/messages/wire.h"
#include "pipeline/schedule.h"

namespace ddp {

/// Sends the messages of a rank in a step, and keeps the memory of each until it has arrived. Sends
/// are asynchronous, because two ranks that waited for sends to each other would never receive.
class StageOutbox {
 public:
  /// \param wire  lives longer.
  explicit StageOutbox(const StageWire& wire) : wire_(wire), dropper_(wire) {}
  /// Starts to send.
  ///
  /// \param action  that made `tensors`. \param stage  that it is of.
  /// \param is_filler  as in the header.
  void send(
      const PipelineAction& action, const PipelineMessage& message, int64_t stage,
      const std::vector<at::Tensor>& tensors, bool is_filler);

  /// Waits until what `action` sent has arrived, and its memory is dropped.
  void finish(const PipelineAction& action);
  /// The same for all that was sent.
  void finish_all();

 private:
  struct Sent {
    PipelineAction action;
    PipelineMessage message;
    int64_t stage = 0;
    std::vector<at::Tensor> memory = {};
    std::vector<c10::intrusive_ptr<c10d::Work>> works = {};
  };

  void start(Sent& sent, const at::Tensor& bytes) const;
  void drop_arrived();
  void drop_all();
  /// Describes the first message that has not arrived.
  std::string text_of_first();
  /// Waits until the first `count` of all messages have arrived.
  void wait_for(size_t count);

  const StageWire& wire_;
  std::deque<Sent> sent_;  // and not arrived; the thread's lock guards it
  size_t arrived_ = 0;     // the same
  TransferThread dropper_;
};

}  // namespace ddp
