#pragma once

#include <cstdint>
#include <memory>
#include <optional>
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

/// The device whose streams the group's messages hold up: `own`, if they do there; else, for a
/// stage without parameters, the current one of the type that has such streams.
c10::Device stream_device(c10d::ProcessGroup& group, c10::Device own);

/// The carriers of a pipeline's messages: the pipeline's group. Where that waits on streams (NCCL),
/// all messages between stages go in batches over its one communicator, and what hosts tell each
/// other goes over the group's backend for the CPU, or over a group of hosts where it has none.
class MessageGroups {
 public:
  /// Without streams.
  MessageGroups() = default;

  /// On streams. Sends one message each way between the stages: the first message of a communicator
  /// connects all its ranks, and the first one between two ranks these, which holds up the host
  /// until they are there.
  ///
  /// \param group  the pipeline's; this library made it, if it has no backend for the CPU.
  /// \param monitor  of it. \param device  of the messages.
  ///
  /// Collective: yes, over `group`. Blocks: host.
  MessageGroups(
      const ProcessGroup& group, GroupMonitor& monitor, const PipelineShape& shape,
      c10::Device device);

  /// For what hosts tell each other; empty without streams.
  const ProcessGroup& hosts() const { return hosts_; }
  bool are_on_streams() const { return are_on_streams_; }

 private:
  ProcessGroup hosts_;
  bool are_on_streams_ = false;
};

/// Carries the messages of one step() or eval() between the stages.
///
/// Messages are bytes, so that each dtype that exists can be sent over each backend: a header and
/// the bytes of each tensor, under one tag, because those arrive in order. On streams headers go
/// between hosts.
struct StageWire {
  ProcessGroup group;                     // the pipeline's
  const MessageGroups& groups;            // of the messages; live longer
  std::shared_ptr<GroupMonitor> monitor;  // of the group
  std::vector<std::string> ranks;         // what texts call the ranks of the group
  PipelineShape shape;
  at::Device device;  // of tensors
  at::Device header_device;
  StageCall call;  // that the messages are of

  /// Whether threads transfer the messages: those in host memory. Where there are streams, these
  /// do, in the order of the calls.
  bool has_threads() const;
  const std::string& name_of(int64_t rank) const { return ranks.at(static_cast<size_t>(rank)); }
  /// The stage of this rank that has the action.
  int64_t stage_of(const PipelineAction& action) const;
  /// The stage that sends what the action of this rank needs.
  int64_t stage_before(const PipelineAction& action) const;

  c10::intrusive_ptr<c10d::Work> send(const at::Tensor& bytes, const PipelineMessage& to) const;
  /// \param bytes  for what comes; stays until the handle has completed.
  c10::intrusive_ptr<c10d::Work> receive(
      const at::Tensor& bytes, const PipelineMessage& from) const;
};

/// The elements as bytes; a copy where they do not lie one after the other.
at::Tensor bytes_of(const at::Tensor& tensor);
/// Numbers as bytes, on a device.
at::Tensor bytes_of(const int64_t* words, int64_t count, at::Device device);
/// The one or two parts in which a header is sent.
std::vector<at::Tensor> parts_of(const StageMessageHeader& header, at::Device device);
/// Appends the numbers that bytes are.
void append_words(const at::Tensor& bytes, std::vector<int64_t>& words);

}  // namespace ddp
