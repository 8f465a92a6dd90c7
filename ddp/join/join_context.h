#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include <ddp/join.h>

#include "join/join_round.h"

namespace ddp {

/// One running join on this rank.
///
/// Before an object communicates, the ranks exchange their status in a round: ranks with input send
/// which object it is, and ranks without input then run that object's JoinHook. Between two rounds
/// only this object communicates: of two models in one backward pass, the second waits for its
/// turn.
class JoinContext {
 public:
  /// Attaches itself to the joinables; the destructor detaches it.
  JoinContext(std::vector<Joinable*> joinables, const JoinOptions& options);
  ~JoinContext();
  C10_DISABLE_COPY_AND_ASSIGN(JoinContext);

  const JoinOptions& options() const { return options_; }

  /// The join that `joinable` is in; null for none.
  static JoinContext* of(const Joinable& joinable) { return joinable.join_context_; }
  /// Whether this thread runs the body of a join of `group` (null: of any group) that continues
  /// when ranks have no input left, so without throw_on_early_termination.
  static bool is_in_uneven_join(const ProcessGroup& group);

  bool has_several() const { return joinables_.size() > 1; }
  const Joinable& first() const { return *joinables_.front(); }

  /// Sends that this rank, which has input, is at `event` of `joinable`, and returns the status of
  /// all ranks.
  ///
  /// \throws AgreedError  when ranks with input are at different places.
  /// \throws c10::Error  with throw_on_early_termination, when a rank has no input left.
  const JoinRound& begin_round(const Joinable& joinable, JoinPlace::Event event, RankStatus mine);
  const JoinRound& round() const { return *round_; }

  /// Gives `joinable` the turn to communicate its backward pass, unless another one has it.
  ///
  /// \return whether it has the turn.
  bool take_turn(const Joinable& joinable);
  void end_turn() { turn_ = nullptr; }

  /// Runs `body`. If it throws, reports the failure to the other ranks.
  void run(const std::function<void()>& body);

  /// Runs the hooks for the other ranks' iterations, until no rank has input left.
  ///
  /// \return whether no rank had any when this one's input ended.
  bool shadow(const std::vector<std::unique_ptr<JoinHook>>& hooks);

 private:
  static JoinContext* find(JoinContext* from, const ProcessGroup& group, bool only_uneven);
  const JoinRound& begin_round(const RankStatus& mine);

  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  std::shared_ptr<GroupMonitor> monitor_;
  std::optional<JoinRound> round_;
  std::atomic<const Joinable*> turn_{nullptr};  // written by autograd's threads
  bool ended_early_ = false;
  int own_rounds_ = 0;        // with input
  JoinContext* const outer_;  // the join around this one, of another group; null for none
};

}  // namespace ddp
