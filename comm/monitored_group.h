#pragma once

#include <memory>
#include <vector>

#include <ddp/internal/group_monitor.h>

#include "bounded_store.h"
#include "interface.h"
#include "recorded_group.h"

namespace ddp {

/// A process group that this library made, and its monitor.
///
/// Its end tells the other ranks when an exception causes it.
class MonitoredGroup : public RecordedGroup {
 public:
  using RecordedGroup::RecordedGroup;

  /// Exchanges the addresses of the ranks' PresenceSockets, and makes the monitor.
  ///
  /// \param store  for the monitors of this group alone.
  /// \param store_host  the rank whose process hosts the store; -1 for none of them.
  ///
  /// Collective: yes. Blocks: host. Cost: two requests to the store.
  void start_monitor(
      const c10::intrusive_ptr<BoundedStore>& store, int store_host,
      std::chrono::milliseconds timeout, const GlooDevices& devices);

  const std::shared_ptr<GroupMonitor>& monitor() const { return monitor_; }

 private:
  void on_last_reference() override;

  std::shared_ptr<GroupMonitor> monitor_;
};

/// The monitor of a group that this library made; null for another one's.
std::shared_ptr<GroupMonitor> own_monitor_of(c10d::ProcessGroup& group);

}  // namespace ddp
