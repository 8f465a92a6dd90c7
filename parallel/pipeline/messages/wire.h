#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pipeline/messages/message_header.h"
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

/// Carries the messages of one step() or eval() between the stages.
///
/// Messages are bytes, so that each dtype that exists can be sent over each backend: a header and
/// the bytes of each tensor, under one tag, because those arrive in order.
///
/// A backend whose waits hold up a stream has no tags, and moves the messages of a group one after
/// the other: there each route has a group, and a rank sends and receives in the order of its list.
struct StageWire {
  ProcessGroup group;                     // the pipeline's
  const MessageGroups& groups;            // of the messages; live longer
  std::shared_ptr<GroupMonitor> monitor;  // of the group
  std::vector<std::string> ranks;         // what texts call the ranks of the group
  at::Device device;                      // of tensors
  at::Device header_device;
  StageCall call;  // that the messages are of

  /// Whether threads transfer the messages: those in host memory. Where there are streams, these
  /// do, in the order of the calls.
  bool has_threads() const;
  const std::string& name_of(int64_t rank) const { return ranks.at(static_cast<size_t>(rank)); }
  /// \param kind  of the action that sends.
  c10::intrusive_ptr<c10d::Work> send(
      const at::Tensor& bytes, char kind, const PipelineMessage& to) const;
  /// \param bytes  for what comes; stays until the handle has completed.
  c10::intrusive_ptr<c10d::Work> receive(
      const at::Tensor& bytes, char kind, const PipelineMessage& from) const;
};

}  // namespace ddp
