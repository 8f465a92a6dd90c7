#include <ddp/internal/before_shutdown.h>

#include <mutex>
#include <utility>
#include <vector>

namespace ddp {
namespace {

using Act = std::function<void()>;

struct Acts {
  std::mutex mutex;
  std::vector<std::weak_ptr<Act>> acts;
};

Acts& all_acts() {
  static Acts instance;
  return instance;
}

}  // namespace

std::shared_ptr<void> call_before_shutdown(std::function<void()> act) {
  auto handle = std::make_shared<Act>(std::move(act));
  auto& all = all_acts();
  const std::lock_guard lock(all.mutex);
  all.acts.push_back(handle);
  return handle;
}

void run_before_shutdown() {
  std::vector<std::shared_ptr<Act>> alive;
  auto& all = all_acts();
  {
    const std::lock_guard lock(all.mutex);
    std::vector<std::weak_ptr<Act>> kept;
    for (const auto& act : all.acts) {
      if (auto one = act.lock()) {
        alive.push_back(std::move(one));
        kept.push_back(act);
      }
    }
    all.acts = std::move(kept);
  }
  for (const auto& act : alive) (*act)();
}

}  // namespace ddp
