#pragma once

#include <ddp/process_group.h>

#include "engine.h"

namespace ddp_bench {

/// Sends messages of a step's sizes without any computation.
class MessageSender {
 public:
  MessageSender(ddp::ProcessGroup group, c10::Device device);

  /// Sums zeros over the ranks in messages of those sizes: all at once, as buckets would be
  /// launched if computing took no time, or one by one.
  ///
  /// \return milliseconds until the last message is complete.
  ///
  /// Collective: yes.
  double send(const Messages& messages);

 private:
  at::Tensor& memory_for(const Messages& messages);

  ddp::ProcessGroup group_;
  at::Tensor memory_;          // for the largest step so far
  at::Tensor backend_memory_;  // the same, from the backend
};

}  // namespace ddp_bench
