#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>

namespace ddp {

/// The ranks that save and load together. When one rank fails, all throw the same text.
class CheckpointPeers {
 public:
  explicit CheckpointPeers(ProcessGroup group);

  int rank() const { return monitor_->rank(); }
  int size() const { return monitor_->size(); }

  /// Gathers one text of each rank, by rank.
  ///
  /// \param doing  for the text of a failure: "saving step 120".
  ///
  /// Collective: yes.
  std::vector<std::string> gather(const std::string& text, const std::string& doing);

  /// Throws the same text, made of the ranks' problems, on every rank; does nothing where all are
  /// "".
  void throw_problems(const std::vector<std::string>& problems, const std::string& doing);

  /// Gathers `problem` and throws if any rank has one. Collective: yes.
  void agree(const std::string& problem, const std::string& doing) {
    throw_problems(gather(problem, doing), doing);
  }

  /// Throws `text`; every other rank throws it at the same time.
  [[noreturn]] void throw_agreed(const std::string& text) { monitor_->throw_agreed(text); }

 private:
  const ProcessGroup group_;
  const std::shared_ptr<GroupMonitor> monitor_;
};

}  // namespace ddp
