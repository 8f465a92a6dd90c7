#include <ddp/deferred_init.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <utility>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/module.h>

#include "deferred/recorder.h"

namespace ddp {

struct DeferredInit::Impl {
  struct Recorded {
    Recorded() { begin_recording(); }
    ~Recorded() { end_recording(); }
    Recorded(const Recorded&) = delete;
    Recorded& operator=(const Recorded&) = delete;
  };
  const Recorded recorded{};
  const c10::impl::IncludeDispatchKeyGuard include{c10::DispatchKey::DeferredInit};
};

DeferredInit::DeferredInit() : impl_(std::make_unique<Impl>()) {}

DeferredInit::~DeferredInit() = default;

bool is_deferred(const at::Tensor& tensor) { return deferred_slot(tensor) != nullptr; }

void materialize(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<std::shared_ptr<Tape>, std::vector<size_t>>> by_tape;
  for (const auto& tensor : tensors) {
    const auto* mark = deferred_slot(tensor);
    if (mark == nullptr) continue;
    auto found = std::find_if(by_tape.begin(), by_tape.end(), [&](const auto& entry) {
      return entry.first == mark->tape;
    });
    if (found == by_tape.end()) found = by_tape.insert(found, {mark->tape, {}});
    found->second.push_back(mark->slot);
  }
  // A check may be a collective, in which a rank of this process waits for another one.
  std::vector<std::function<void()>> checks;
  for (const auto& [tape, slots] : by_tape) {
    const std::lock_guard lock(tape->mutex);
    auto of_tape = replay(*tape, slots);
    std::move(of_tape.begin(), of_tape.end(), std::back_inserter(checks));
  }
  for (const auto& check : checks) check();
}

void materialize(torch::nn::Module& module) {
  auto tensors = module.parameters();
  const auto buffers = module.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  materialize(tensors);
}

}  // namespace ddp
