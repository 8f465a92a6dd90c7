#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "group/group_recipe.h"
#include "group/recorded_group.h"

namespace ddp {

/// A process group that this library made, with its monitor.
///
/// If an exception destroys the group, it reports that to the other ranks.
class MonitoredGroup : public RecordedGroup {
 public:
  using RecordedGroup::RecordedGroup;

  /// Makes the monitor, as a part of the recipe's job.
  ///
  /// \param recipe  that the backends were made with.
  /// \param key  of the group; differs between the groups of a job.
  void start_monitor(GroupRecipe recipe, const std::string& key);

  /// Set by start_monitor().
  const GroupRecipe& recipe() const { return recipe_; }

  const std::shared_ptr<GroupMonitor>& monitor() const { return monitor_; }

  /// The key of the next group that all ranks of this group make together.
  std::string next_subgroup_key() { return ddp::str(key_, '/', ++subgroups_made_); }

 private:
  void on_last_reference() override;

  GroupRecipe recipe_;
  std::string key_;
  std::atomic<uint64_t> subgroups_made_{0};
  std::shared_ptr<GroupMonitor> monitor_;
};

/// Returns the monitor of a group that this library made; null for any other group.
std::shared_ptr<GroupMonitor> own_monitor_of(c10d::ProcessGroup& group);

}  // namespace ddp
