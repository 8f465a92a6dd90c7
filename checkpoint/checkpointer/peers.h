#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include <ddp/internal/gather_strings.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>
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

  /// Gathers `problem` and `text`, and throws if any rank has a problem; returns the texts, by
  /// rank.
  std::vector<std::string> agree_without(
      const std::string& problem, const std::string& text, const std::string& doing);

  /// Gathers `problem` and throws if any rank has one.
  void agree(const std::string& problem, const std::string& doing) {
    agree_without(problem, "", doing);
  }

  /// Throws `text`; every other rank throws it at the same time.
  [[noreturn]] void throw_agreed(const std::string& text) { monitor_->throw_agreed(text); }

 private:
  ProcessGroup group_;
  std::shared_ptr<GroupMonitor> monitor_;
};

/// One text of the ranks' problems: "" where all are "".
std::string describe_problems(const std::vector<std::string>& by_rank, const std::string& doing);

/// Unpacks each rank's `Count` texts, and returns the texts of all ranks for each position.
template <size_t Count>
std::array<std::vector<std::string>, Count> texts_by_position(
    const std::vector<std::string>& ranks) {
  std::array<std::vector<std::string>, Count> places;
  for (const auto& rank : ranks) {
    const auto texts = unpacked(rank);
    for (size_t place = 0; place < Count; ++place) places[place].push_back(texts.at(place));
  }
  return places;
}

/// Ends the text of an error whose usual reason is that ranks see different folders.
inline constexpr const char* kShareRemedy = ". Name a folder that all ranks share.";

}  // namespace ddp
