#include "pipeline/action_events.h"

#include <cstddef>

#include <ddp/internal/current_stream.h>

namespace ddp {

void ActionEvents::record() {
  auto& event = events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(current_stream_of(device_));
}

void ActionEvents::fill(PipelineStepStats& step) const {
  const auto at = [&](size_t event) { return events_.front().elapsedTime(events_.at(event)); };
  for (size_t k = 0; k < step.actions.size(); ++k) {
    step.actions[k].begin_ms = at(2 * k + 1);
    step.actions[k].end_ms = at(2 * k + 2);
  }
  step.total_ms = at(events_.size() - 1);
}

}  // namespace ddp
