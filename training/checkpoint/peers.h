#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>

namespace ddp {

/// The ranks that save and load together: one that cannot go on lets all others know, and all throw
/// the same.
class CheckpointPeers {
 public:
  explicit CheckpointPeers(ProcessGroup group);

  int rank() const { return monitor_->rank(); }
  int size() const { return monitor_->size(); }

  /// All ranks' texts, by rank. \param doing  for the text of a failure: "saving step 120".
  ///
  /// Collective: yes.
  std::vector<std::string> gather(const std::string& text, const std::string& doing);

  /// Throws on every rank what the texts, one a rank, name; where all are "", nothing.
  void throw_problems(const std::vector<std::string>& problems, const std::string& doing);

  /// Both. Collective: yes.
  void agree(const std::string& problem, const std::string& doing) {
    throw_problems(gather(problem, doing), doing);
  }

  /// Throws `text`, as every other rank does now.
  [[noreturn]] void throw_agreed(const std::string& text) { monitor_->throw_agreed(text); }

 private:
  const ProcessGroup group_;
  const std::shared_ptr<GroupMonitor> monitor_;
};

}  // namespace ddp
