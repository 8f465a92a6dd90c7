#pragma once

#include <memory>
#include <vector>

#include <ddp/internal/group_monitor.h>

#include "base/network_interface.h"
#include "group/recorded_group.h"
#include "store/bounded_store.h"

namespace ddp {

/// A process group that this library made, with its monitor.
///
/// If an exception destroys the group, it reports that to the other ranks.
class MonitoredGroup : public RecordedGroup {
 public:
  using RecordedGroup::RecordedGroup;

  /// Exchanges the addresses of the ranks' LivenessSockets, and makes the monitor.
  ///
  /// \param store  used by the monitors of this group alone.
  /// \param store_host  the rank whose process hosts the store; -1: none of them.
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

/// Returns the monitor of a group that this library made; null for any other group.
std::shared_ptr<GroupMonitor> own_monitor_of(c10d::ProcessGroup& group);

}  // namespace ddp
