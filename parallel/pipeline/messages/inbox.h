#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>
#include <ddp/internal/group_monitor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pipeline/messages/message_header.h"
#include "pipeline/messages/transfer.h"
#include "pipeline/messages/wire.h"
#include "pipeline/schedule.h"

namespace ddp {

/// A message that a rank gets in a step.
struct ExpectedMessage {
  PipelineAction action;  // that needs it
  PipelineMessage message;
  int64_t stage = 0;  // that sends it
};

struct StageMessage {
  StageMessageHeader header;
  std::vector<at::Tensor> tensors;
  std::vector<uint64_t> calls = {};  // that a thread has received it by, in the list of calls
};

/// Receives the messages of one direction in a step, in their order.
///
/// A thread receives the next ones while this rank computes: Gloo begins to send a message when its
/// receiver is ready for it, and how large it is stands in its header. Messages in device memory
/// are received when they are needed.
class StageInbox {
 public:
  /// \param wire  lives longer. \param expected  in the order in which the sender sends them.
  StageInbox(const StageWire& wire, std::vector<ExpectedMessage> expected);
  /// Waits for the next message.
  ///
  /// \param where  what needs it.
  StageMessage take(WaitPoint where);

 private:
  struct Posted {
    at::Tensor memory;
    c10::intrusive_ptr<c10d::Work> work;
  };
  using Wait = c10::function_ref<void(const c10::intrusive_ptr<c10d::Work>&)>;

  Posted post(const at::Tensor& memory, const ExpectedMessage& expected) const;
  Posted post_words(int64_t count, const ExpectedMessage& expected) const;
  StageMessage receive(const ExpectedMessage& expected, const Posted& header, Wait wait) const;
  void receive_all();

  const StageWire& wire_;
  const std::vector<ExpectedMessage> expected_;
  std::deque<StageMessage> arrived_;  // and not taken; the thread's lock guards it
  size_t taken_ = 0;                  // the same
  TransferThread receiver_;
};

}  // namespace ddp
