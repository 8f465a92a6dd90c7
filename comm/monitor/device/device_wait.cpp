#include "monitor/device/device_wait.h"

#include <thread>

#include <ddp/internal/error_text.h>
#include <ddp/internal/text.h>

#include "monitor/device/device_watch.h"

namespace ddp {
namespace {

using namespace monitor;

// A rank that sends or receives waits for one other: it may end, and so may a root, once its part
// is done, which the backend knows.
Peers peers_of(const CollectiveCall& call) {
  switch (call.kind) {
    case CollectiveKind::Broadcast:
    case CollectiveKind::Reduce:
    case CollectiveKind::Gather:
    case CollectiveKind::Scatter:
    case CollectiveKind::Message:
      return Peers::Some;
    default:
      return Peers::All;
  }
}

}  // namespace

GroupMonitor::DeviceWait::DeviceWait(GroupMonitor& monitor, const DeviceWorks::Entry& entry)
    : number(entry.number),
      call(entry.call),
      where([what = to_text(entry.call.kind)] { return std::string(what); }),
      late(monitor, where, peers_of(call), nullptr) {}

void GroupMonitor::watch(c10d::Work& work, const CollectiveCall& call) {
  if (!setup_.reports_results || !is_watching()) return;
  const auto self = weak_from_this();
  if (device_works_->add(work, call)) setup_.job->device_watch().add(self);
}

bool GroupMonitor::look_at_device() noexcept {
  try {
    const auto state = device_works_->look();
    if (aborted()) {
      device_wait_.reset();
      return false;
    }
    if (state.failed) {
      const auto where = [&] { return to_text(state.failed->call); };
      throw_failed(backend_error(describe_end(*state.failed)), where);
    }
    if (device_wait_ && (!state.oldest || device_wait_->number != state.oldest->number)) {
      device_wait_.reset();
    }
    if (!state.oldest) return false;
    if (DeviceWorks::Clock::now() - state.oldest->since < kWaitSlice) return true;
    if (!device_wait_) device_wait_ = std::make_unique<DeviceWait>(*this, *state.oldest);
    device_wait_->late.check_group([&](milliseconds at_most) {
      std::this_thread::sleep_for(at_most);
      return state.oldest->result->completed();  // the next look takes it
    });
    return true;
  } catch (const std::exception&) {
    // The failure is recorded, and the groups are aborted: the program's next call throws.
    device_wait_.reset();
    return false;
  }
}

void GroupMonitor::wait_for_device(WaitPoint where) {
  if (!setup_.reports_results || !is_watching()) return;
  poll([this] { return !device_works_->has_pending(); }, where);
}

}  // namespace ddp
