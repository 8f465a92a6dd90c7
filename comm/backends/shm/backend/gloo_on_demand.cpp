#include "gloo_on_demand.h"

#include <chrono>
#include <thread>
#include <utility>

#include <ddp/internal/check.h>

namespace ddp::backends::shm {

GlooOnDemand::GlooOnDemand(BackendPtr connected) { state_->gloo = std::move(connected); }

GlooOnDemand::GlooOnDemand(Connect connect) : connect_(std::move(connect)) {}

BackendPtr GlooOnDemand::if_connected() const {
  const std::lock_guard lock(state_->mutex);
  return state_->gloo;
}

BackendPtr GlooOnDemand::connect(c10::function_ref<std::string()> why_not) {
  constexpr std::chrono::milliseconds kPoll{50};
  if (auto connected = if_connected()) return connected;
  std::shared_future<BackendPtr> connecting;
  {
    const std::lock_guard lock(mutex_);
    if (!connecting_.valid()) {
      std::packaged_task<BackendPtr()> task([state = state_, connect = connect_] {
        auto gloo = connect();
        const std::lock_guard lock(state->mutex);
        state->gloo = gloo;
        if (state->aborted) gloo->abort();
        return gloo;
      });
      connecting_ = task.get_future().share();
      std::thread(std::move(task)).detach();
    }
    connecting = connecting_;
  }
  while (connecting.wait_for(kPoll) != std::future_status::ready) {
    const auto why = why_not();
    DDP_CHECK_WITH(DistBackendError, why.empty(), why);
  }
  return connecting.get();
}

void GlooOnDemand::abort() {
  const std::lock_guard lock(state_->mutex);
  state_->aborted = true;
  if (state_->gloo) state_->gloo->abort();
}

}  // namespace ddp::backends::shm
