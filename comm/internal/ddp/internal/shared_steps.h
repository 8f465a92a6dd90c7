#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

/// Says what a rank with more steps than another one did, and the rule that it broke: "began a
/// training forward pass that" and "Every rank has to train on as many batches".
struct StepsText {
  std::string began, rule;

  /// The likely cause of collectives that do not match. Ends with ": ".
  std::string explain(const std::string& more, const std::string& fewer) const {
    return more + " " + began + " " + fewer + " did not. " + rule + ": ";
  }
};

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
  virtual const StepsText& text() const = 0;
  /// Reads from the group's store what the ranks recorded. Called on the store's thread while this
  /// rank waits late.
  virtual void read(c10d::Store& store) = 0;
  /// The failure found by read(), if any: why a rank that this one waits for does not come.
  virtual std::optional<std::string> failure() const = 0;
};

}  // namespace ddp
