#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ddp/join.h>

#include "join_round.h"

namespace ddp {

/// One join that goes on, on this rank: what its joinables ask about it.
class JoinContext {
 public:
  /// Attaches itself to the joinables, until the destructor.
  JoinContext(std::vector<Joinable*> joinables, const JoinOptions& options);
  ~JoinContext();
  JoinContext(const JoinContext&) = delete;
  JoinContext& operator=(const JoinContext&) = delete;

  const JoinOptions& options() const { return options_; }

  /// Whether ranks begin an iteration with its backward pass, and not with its forward pass: then
  /// a forward pass that is never trained on is nobody else's business. Not so where further
  /// objects communicate in each iteration, or where the ranks stop before a forward pass.
  bool begins_in_backward() const {
    return joinables_.size() == 1 && !options_.throw_on_early_termination();
  }

  /// Whether this one's iterations are what is counted.
  bool counts(const Joinable& joinable) const { return &joinable == joinables_.front(); }

  /// The position of `joinable` in the list of those that join.
  int index_of(const Joinable& joinable) const;

  /// The ranks agreed in forward on a backward pass to come; or that one begins.
  void expect_backward(bool expected) { expects_backward_ = expected; }
  /// \throws c10::DistBackendError  when this rank left out a backward pass that others wait for;
  ///         they throw the same text.
  void check_backward_ran();

  /// Begins an iteration together with all ranks.
  ///
  /// \throws c10::Error  when one has no input left and that shall end the join.
  const JoinRound& begin_round(const RankEntry& mine);
  const JoinRound& round() const { return *round_; }

  /// Runs the training loop and what follows it, and tells the other ranks if that throws.
  void run(const std::function<void()>& body);

  /// Takes part in the other ranks' iterations until there are none.
  ///
  /// \return whether there were none.
  bool shadow(const std::vector<std::unique_ptr<JoinHook>>& hooks);

 private:
  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  std::shared_ptr<GroupMonitor> monitor_;
  std::optional<JoinRound> round_;
  bool ended_early_ = false;
  bool expects_backward_ = false;
};

}  // namespace ddp
