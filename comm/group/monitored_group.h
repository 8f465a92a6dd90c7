#pragma once

#include <memory>
#include <vector>

#include <ddp/internal/group_monitor.h>

#include "group/group_recipe.h"
#include "group/recorded_group.h"

namespace ddp {

/// A process group that this library made, with its monitor.
///
/// If an exception destroys the group, it reports that to the other ranks.
class MonitoredGroup : public RecordedGroup {
 public:
  using RecordedGroup::RecordedGroup;

  /// Exchanges the addresses of the ranks' LivenessSockets, and makes the monitor.
  ///
  /// \param recipe  that the backends were made with.
  /// \param store  used by the monitors of this group alone.
  ///
  /// Collective: yes. Blocks: host. Cost: two requests to the store.
  void start_monitor(GroupRecipe recipe, const c10::intrusive_ptr<BoundedStore>& store);

  /// Set by start_monitor().
  const GroupRecipe& recipe() const { return recipe_; }

  const std::shared_ptr<GroupMonitor>& monitor() const { return monitor_; }

 private:
  void on_last_reference() override;

  GroupRecipe recipe_;
  std::shared_ptr<GroupMonitor> monitor_;
};

/// Returns the monitor of a group that this library made; null for any other group.
std::shared_ptr<GroupMonitor> own_monitor_of(c10d::ProcessGroup& group);

}  // namespace ddp
