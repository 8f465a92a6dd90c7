#include "ddp_engine.h"

#include <utility>

namespace ddp_bench {

DdpEngine::DdpEngine(
    Task given, const ddp::DistributedDataParallelOptions& options, Optimize optimize)
    : Engine(std::move(given)), when_(optimize), model_(task().net, options) {
  if (when_ == Optimize::InBackward) model_->step_in_backward(optimizer());
}

void DdpEngine::optimize() {
  if (when_ == Optimize::AfterBackward) Engine::optimize();
}

std::optional<double> DdpEngine::chosen_cap_mb() const {
  const auto tuning = stats().tuning;
  return tuning ? std::optional<double>(tuning->cap_mb) : std::nullopt;
}

Messages DdpEngine::messages() const {
  const auto all_parameters = parameters();
  Messages messages;
  messages.in_backend_memory = true;
  for (const auto& bucket : model_->stats().buckets) {
    size_t bytes = 0;
    for (const size_t index : bucket) bytes += all_parameters[index].nbytes();
    messages.elements.push_back(static_cast<int64_t>(bytes / sizeof(float)));
  }
  return messages;
}

}  // namespace ddp_bench
