#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

/// Steps that every rank of a group runs equally often, and that their owner counts: a wrapper's
/// forward passes. A rank whose step failed, or that ran fewer of them, does not come to the
/// collectives that follow, for which other ranks wait.
///
/// Threads: all members, from any thread.
class SharedSteps {
 public:
  virtual ~SharedSteps() = default;

  /// A number that grows with each step of this rank, and is equal on ranks that ran the same
  /// steps.
  virtual uint64_t count() const = 0;
  /// The likely cause of collectives that do not match: the ranks `more` ran a step that the ranks
  /// `fewer` did not run. Ends with ": ".
  virtual std::string explain(const std::string& more, const std::string& fewer) const = 0;
  /// Reads from the group's store what the ranks recorded. Called on the store's thread while this
  /// rank waits late.
  virtual void read(c10d::Store& store) = 0;
  /// Of what was read: why a rank that this one waits for does not come.
  virtual std::optional<std::string> failure() const = 0;
};

}  // namespace ddp
