#pragma once

#include <map>
#include <vector>

#include <c10/core/Device.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>

#include "pipeline/schedule.h"

namespace ddp {

/// Whether the group's collectives and messages of that device hold up a stream, and not the host.
bool has_streams(c10d::ProcessGroup& group, c10::Device device);

/// The groups that carry a pipeline's messages: the pipeline's own, or one a route, where a group
/// has one stream for all (NCCL). They fail with the pipeline's group, as groups that are made of
/// it.
class MessageGroups {
 public:
  /// The pipeline's own, without streams.
  MessageGroups() = default;

  /// On streams. Makes a group for each route, if there are any, and sends one message each way:
  /// the first message between two ranks connects them, which holds up the host until both are
  /// there.
  ///
  /// \param group  the pipeline's, that this library made. \param monitor  of it.
  /// \param device  of the messages.
  ///
  /// Collective: yes, over `group`. Blocks: host.
  MessageGroups(
      const ProcessGroup& group, GroupMonitor& monitor, const std::vector<MessageRoute>& routes,
      c10::Device device);

  /// \param own  the pipeline's.
  const ProcessGroup& of(const MessageRoute& route, const ProcessGroup& own) const;

  bool are_on_streams() const { return are_on_streams_; }

 private:
  std::map<MessageRoute, ProcessGroup> groups_;
  bool are_on_streams_ = false;
};

}  // namespace ddp
