#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/process_group.h>

namespace ddp {

/// What ranks leave in their group's store for each other when something is wrong: reached only
/// when a collective lags or breaks, so a healthy step costs nothing.
///
/// Notes belong to one reduced backward pass, numbered alike on all ranks; those of earlier passes
/// are never looked at again.
///
/// Threads: any; the stores are thread safe. No call throws: a store that cannot be reached holds
/// no notes.
class PeerNotes {
 public:
  /// Every rank constructs its wrappers over a group in the same order, so they get one number.
  explicit PeerNotes(ProcessGroup group);

  /// Tells the others why this rank does not go on with `pass`. The first note of a pass stays.
  ///
  /// \return the note that stands: this one, or an earlier rank's.
  std::string report_failure(int64_t pass, const std::string& text) const noexcept;

  /// The note that stands for `pass`, if any.
  std::optional<std::string> failure(int64_t pass) const noexcept;

  /// Tells the others that this rank has been waiting in `place` of `pass`.
  void report_place(int64_t pass, const std::string& place) const noexcept;

  /// Which ranks said that they were in `place` of `pass`, and which did not: "ranks 0, 2 had
  /// arrived, rank 1 had not"; "" when nobody said so.
  std::string arrivals(int64_t pass, const std::string& place) const noexcept;

  /// Whether all ranks said within `patience` that they were in `place` of `pass`.
  bool all_arrive(
      int64_t pass, const std::string& place, std::chrono::milliseconds patience) const noexcept;

 private:
  std::string key(int64_t pass, const std::string& what) const;
  std::vector<int> ranks_not_in(int64_t pass, const std::string& place) const;
  std::optional<std::string> get(const std::string& key) const;

  ProcessGroup group_;
  c10::intrusive_ptr<c10d::Store> store_;  // empty: a world of one, or a group without a store
  int64_t number_ = 0;
};

}  // namespace ddp
