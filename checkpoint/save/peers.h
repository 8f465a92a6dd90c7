#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ddp/internal/gather_strings.h>
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

  /// Gathers `text`, and throws what `make_problem` makes of all texts on every rank; returns them
  /// where that is "".
  std::vector<std::string> agree(
      const std::string& text, const std::string& doing, ProblemOfRanks make_problem);

  /// Gathers `problem` and throws if any rank has one.
  void agree(const std::string& problem, const std::string& doing);

  /// Throws `text`; every other rank throws it at the same time.
  [[noreturn]] void throw_agreed(const std::string& text) { monitor_->throw_agreed(text); }

 private:
  const ProcessGroup group_;
  const std::shared_ptr<GroupMonitor> monitor_;
};

/// One text of the ranks' problems: "" where all are "".
std::string describe_problems(const std::vector<std::string>& by_rank, const std::string& doing);

}  // namespace ddp
