#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/process_group.h>

namespace ddp {

/// Where a rank waits for the others.
struct Whereabouts {
  int64_t pass = 0;
  uint64_t forwards = 0;     // that count, since the last pass
  bool in_backward = false;  // or before one more forward
  std::string place;         // "bucket 3"
  bool waits = true;         // still

  bool operator==(const Whereabouts& other) const {
    return pass == other.pass && in_backward == other.in_backward && place == other.place;
  }
};

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

  /// The same for what may turn out to be no reason to stop: to be looked at when a collective
  /// breaks anyway.
  void report_suspicion(int64_t pass, const std::string& text) const noexcept;
  std::optional<std::string> suspicion(int64_t pass) const noexcept;

  /// Tells the others that this rank waits, or waited, there.
  void report(const Whereabouts& here) const noexcept;

  /// Tells the others that this rank waits there no longer.
  void report_passed(Whereabouts here) const noexcept;

  /// Which ranks said that they were there too, and which did not: "ranks 0, 2 had arrived, rank 1
  /// had not"; "" when nobody said so.
  std::string arrivals(const Whereabouts& here) const noexcept;

  /// Tells the others that `pass` failed on this rank, and where.
  void report_failed(int64_t pass, const std::string& place) const noexcept;

  /// The same, and waits until all say so.
  ///
  /// \return "" when all ranks failed there; else, as soon as that cannot be any more or after the
  ///         store's timeout, where not: "not on every rank".
  std::string fail_alike(int64_t pass, const std::string& place) const noexcept;

  /// How the forwards and backwards of another rank that waits cannot match this one's any more, so
  /// that both would wait for ever; "" when they can.
  std::string mismatch(const Whereabouts& here) const noexcept;

  /// Tells the others that this rank will not come to `pass` or any later one.
  ///
  /// \param waits  how many collectives before forward it has seen the end of, in all passes.
  /// \param because  why its reducer is not usable any more; "": it is gone.
  void report_end(int64_t pass, int64_t waits, const std::string& because = "") const noexcept;

  struct End {
    int rank;
    std::string because;
  };
  /// A rank that said that it will not come to `pass`, if any.
  ///
  /// \param waits  where this rank waits before forward: how many of those it has seen the end of.
  ///   A rank that has seen that of more may end: what this one waits for is on its way.
  std::optional<End> ended_before(
      int64_t pass, int64_t waits = std::numeric_limits<int64_t>::max()) const noexcept;

 private:
  std::string key(const std::string& what) const;
  std::string failure_key(int64_t pass) const;
  std::string failed_key(int64_t pass, int rank) const;
  std::string place_key(int rank) const;
  std::optional<Whereabouts> whereabouts(int rank) const;
  std::vector<int> ranks_not_at(const Whereabouts& here) const;
  std::optional<std::string> get(const std::string& key) const;

  ProcessGroup group_;
  c10::intrusive_ptr<c10d::Store> store_;  // empty: a world of one, or a group without a store
  int64_t number_ = 0;
};

}  // namespace ddp
