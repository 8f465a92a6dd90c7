#pragma once

#include <memory>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <ddp/pipeline_stats.h>

namespace ddp {

/// When the actions of a step ran on a device, for whose messages no host waits: the host's times
/// are those at which it queued them.
class ActionEvents {
 public:
  /// Begins a step on the device's current stream.
  explicit ActionEvents(c10::Device device) : device_(device) { record(); }
  /// Marks the beginning of an action, or its end, by turns.
  void record();
  /// Whether the device has ended the step. Does not wait.
  bool has_ended() const { return events_.back().query(); }
  /// Gives the step the device's times, since it began the step there.
  void fill(PipelineStepStats& step) const;

 private:
  const c10::Device device_;
  std::vector<c10::Event> events_;
};

/// A step that its host has queued.
struct QueuedStep {
  PipelineStepStats times;
  std::shared_ptr<ActionEvents> events;  // null: the times are those of the host
};

}  // namespace ddp
