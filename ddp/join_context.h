#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include <ddp/join.h>

#include "join_round.h"

namespace ddp {

/// One join that goes on, on this rank: what its joinables ask about it.
///
/// Before an object communicates, the ranks exchange entries: those with input say which object it
/// is, and those without learn from that whose part to take. Between two such rounds only the one
/// object communicates: of two models in one backward pass, the second waits for its turn.
class JoinContext {
 public:
  /// Attaches itself to the joinables, until the destructor.
  JoinContext(std::vector<Joinable*> joinables, const JoinOptions& options);
  ~JoinContext();
  JoinContext(const JoinContext&) = delete;
  JoinContext& operator=(const JoinContext&) = delete;

  const JoinOptions& options() const { return options_; }

  /// Whether this thread runs the body of a join of `group`, or of any where that is null, that
  /// goes on without ranks that have no input left.
  static bool is_in_one_that_goes_on(const ProcessGroup& group);

  bool has_several() const { return joinables_.size() > 1; }
  const Joinable& first() const { return *joinables_.front(); }

  /// Says that this rank, which has input, is at `event` of `joinable`, and learns what the others
  /// say.
  ///
  /// \throws AgreedError  when ranks with input are at different places.
  /// \throws c10::Error  when one has no input left and that shall end the join.
  const JoinRound& begin_round(const Joinable& joinable, JoinPlace::Event event, RankEntry mine);
  const JoinRound& round() const { return *round_; }

  /// Gives `joinable` the turn to communicate its backward pass, where no other one has it.
  ///
  /// \return whether it has the turn.
  bool take_turn(const Joinable& joinable);
  void end_turn() { turn_ = nullptr; }

  /// Runs the training loop and what follows it, and tells the other ranks if that throws.
  void run(const std::function<void()>& body);

  /// Takes part in the other ranks' iterations until there are none.
  ///
  /// \return whether there were none.
  bool shadow(const std::vector<std::unique_ptr<JoinHook>>& hooks);

 private:
  static JoinContext* find(JoinContext* from, const ProcessGroup& group, bool goes_on);
  const JoinRound& begin_round(const RankEntry& mine);

  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  std::shared_ptr<GroupMonitor> monitor_;
  std::optional<JoinRound> round_;
  std::atomic<const Joinable*> turn_{nullptr};  // taken on autograd's threads
  bool ended_early_ = false;
  JoinContext* const outer_;  // the join around this one, of another group; null for none
};

}  // namespace ddp
