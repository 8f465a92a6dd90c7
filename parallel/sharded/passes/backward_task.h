#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "sharded/sharded_model.h"

namespace ddp {

/// One backward pass through a sharded model: gathers and reduces its units in the order that
/// follows from forward.
///
/// A rank whose loss leaves a unit out still gathers it, and reduces zeros, at the same place: when
/// autograd gets to the marker of its exit, or at the latest to what forward made before.
class BackwardTask {
 public:
  explicit BackwardTask(ShardedModel& model);

  /// Calls the model's end_backward() when autograd ends the pass that runs on this thread.
  void watch_end();

  /// Gradients arrived at the outputs of a use.
  void enter(const std::shared_ptr<ForwardPass>& pass, size_t use);
  /// The gradients of the inputs of a use are complete.
  void leave(const std::shared_ptr<ForwardPass>& pass, size_t use);
  /// Forward is computed again.
  ///
  /// \param reduces  of the unit, if it is a root.
  ShardedModel::Place enter_again(ShardedUnit& unit, bool reduces);
  /// The gradients of the inputs of a use that was computed again are complete.
  void on_repeated_exit(const ShardedModel::Place& place, ShardedUnit& unit);
  void on_gradient(ShardedUnit& unit);

  /// Gathers and reduces what is left, and adds the gradients to the shards'.
  void finish();
  /// Makes all units shards, with the gradients before.
  void fail() noexcept;

 private:
  /// A forward pass that this backward pass runs through.
  struct Walk {
    std::shared_ptr<ForwardPass> pass;
    std::vector<size_t> gathers;  // uses, in order
    size_t next = 0;
    int64_t released_since = 0;  // uses entered since are done
  };

  Walk& walk(const std::shared_ptr<ForwardPass>& pass);
  void begin_walk(const std::shared_ptr<ForwardPass>& pass);
  /// Gathers the uses that forward left after `exit` and autograd left out.
  ///
  /// \param time  as of mark_done_since(), when it is done with them.
  void gather_skipped_uses(Walk& walk, int64_t exit, int64_t time);
  /// Nothing uses what was entered since `time` any more.
  void mark_done_since(Walk& walk, int64_t time);
  void gather_ahead(Walk& walk);
  void hide_units();
  void reduce_ready();
  void reduce(ShardedUnit& unit);
  void finish_packed();
  using Step = void (UnitGradients::*)(const UnitGradients::Groups&);
  void in_reduction(ShardedUnit& unit, Step step) const;
  bool accumulates() const;
  /// Whether the forward passes so far have no reduction.
  bool accumulates_whole() const;
  /// The units of all walks in the order of reductions.
  std::vector<size_t> reduction_order() const;

  ShardedModel& model_;
  std::set<int> watched_;   // ids of autograd's passes: this one and those inside it
  std::deque<Walk> walks_;  // the newest forward pass first
  // Whether units are reduced as soon as they are ready, because one forward pass alone can come.
  const bool reduces_early_;
  const std::shared_ptr<void> gradients_service_;
  bool accumulates_ = true;
  std::vector<size_t> order_;  // of reductions
  ShardedUnit* reducing_ = nullptr;
};

}  // namespace ddp
