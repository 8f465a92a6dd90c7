#include "ddp_engine.h"

#include <utility>

namespace ddp_bench {

DdpEngine::DdpEngine(Task given, const ddp::DistributedDataParallelOptions& options)
    : Engine(std::move(given)), model_(task().net, options) {}

Messages DdpEngine::messages() const {
  const auto all_parameters = parameters();
  Messages messages;
  for (const auto& bucket : model_->reducer().bucket_indices()) {
    int64_t elements = 0;
    for (const size_t index : bucket) elements += all_parameters[index].numel();
    messages.elements.push_back(elements);
  }
  return messages;
}

}  // namespace ddp_bench
