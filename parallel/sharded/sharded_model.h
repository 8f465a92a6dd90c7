#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <ddp/internal/forward_count.h>
#include <ddp/internal/gradient_memory.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>

#include "sharded/passes/pass_order.h"
#include "sharded/sharded_unit.h"

namespace ddp {

class BackwardTask;
class PassNotes;

/// One forward pass of a root, as long as a graph of it exists.
struct ForwardPass {
  std::shared_ptr<ShardedModel> model;
  PassOrder order;
  size_t root = 0;                // the unit that the program called
  bool reduces = true;            // its backward pass
  bool has_graph = false;         // a node of it was made
  bool is_recomputation = false;  // of a root, in backward
  bool is_released = false;       // backward freed the graph
  bool has_thrown = false;
  std::vector<std::vector<bool>> used_shards = {};  // by graphs from before; by unit
  WeakNodePtr begin = {};                           // the marker before all others
};

/// Tells the other ranks which pass of a sharded model threw on this one: they wait for its gathers
/// and reductions. From the first one on, autograd calls ShardedModel::backward_failed() of the
/// models in whose graph a backward pass threw. A pass that throws on every rank leaves the model
/// usable.
class FailedPasses {
 public:
  /// Collective: no; in the same order on all ranks.
  explicit FailedPasses(const ProcessGroup& group);

  /// A forward pass begins: after one that threw, when it has thrown on all ranks.
  ///
  /// \throws c10::DistBackendError  where it did not.
  void begin();
  /// The pass threw, in forward or in backward.
  ///
  /// \param doing  "forward".
  void note(const char* doing, const std::exception_ptr& cause) noexcept;

 private:
  const std::shared_ptr<GroupMonitor> monitor_;
  ForwardCount forwards_;
  bool is_noted_ = false;  // of this pass
};

/// The units under one root: runs their gathers and reductions in the same order on every rank.
///
/// Gathers and reductions have groups of their own: with gathers ahead, and where a rank leaves a
/// unit out of its loss, their interleaving with each other and with the program's collectives
/// differs between ranks.
class ShardedModel : public std::enable_shared_from_this<ShardedModel> {
 public:
  /// Collective: yes.
  ///
  /// \param root  a unit that add() gets.
  ShardedModel(const ShardedUnit& root, int64_t prefetch);
  ~ShardedModel();

  void add(const std::shared_ptr<ShardedUnit>& unit);
  /// Takes the units of another model, whose root is in the module at `path`.
  void adopt(ShardedModel& other, const std::string& path);
  const std::vector<std::shared_ptr<ShardedUnit>>& units() const { return units_; }
  ShardedUnit& unit(size_t index) const { return *units_[index]; }
  int64_t prefetch() const { return prefetch_; }
  c10::Device device() const;
  const UnitGradients::Groups& reduce_groups() const { return reduce_groups_; }
  /// Sets the module whose buffers all ranks get from rank 0 when the root's gradients are reduced.
  void set_root(const std::shared_ptr<torch::nn::Module>& module) { root_ = module; }
  /// Collective: yes. Blocks: host.
  void broadcast_buffers();

  /// A use of a unit by forward.
  struct Place {
    std::shared_ptr<ForwardPass> pass;
    size_t use = PassOrder::npos;
    bool is_recomputed = false;
  };
  Place enter(ShardedUnit& unit, bool reduces);
  void leave(ShardedUnit& unit, const Place& place);
  /// Before leave(): the marker of the use for pass_through_node(); null if backward does not get
  /// to it.
  NodePtr mark_exit(const std::shared_ptr<ShardedUnit>& unit, const Place& place);
  /// Before leave() of the root: throws if forward computed with parameters that were shards.
  void check_shards_unused(const Place& place) const;
  /// In the handler of an exception of forward: adds to its error which unit's threw, the
  /// innermost, and tells the other ranks.
  void forward_failed(const ShardedUnit& unit);
  void backward_failed(const std::exception_ptr& cause) noexcept;
  /// After an exception in forward.
  void abandon(ShardedUnit& unit, const Place& place) noexcept;

  /// From autograd's nodes and hooks.
  void on_entry(const Place& place, ShardedUnit& unit);
  void on_exit(const Place& place, ShardedUnit& unit);
  void before_gradient();
  void on_gradient(ShardedUnit& unit);
  void end_backward(bool has_failed);

  bool keeps_whole(const ShardedUnit& unit, const ForwardPass& pass) const;
  /// Whether the backward pass that begins may reduce units as soon as they are ready, because it
  /// runs through one forward pass alone.
  bool may_reduce_early();
  /// Compares the ranks' notes of a pass: on a device those of the pass before, so that the host
  /// runs up to one step ahead.
  ///
  /// \throws c10::Error  on all ranks, where they did different things.
  void compare(std::shared_ptr<PassNotes> notes);
  /// While units are held: the next backward pass reduces.
  void expect_reduction() { expects_reduction_ = true; }
  /// Memory in which one unit at a time packs its gradients, which keeps its pages: new memory that
  /// ranks share costs a page fault for each. Undefined for one rank.
  at::Tensor packed_memory(const UnitGradients& gradients);
  /// Leaves that memory to what may still read it.
  void part_with_packed_memory() noexcept { packed_.reset(); }
  /// Until the result is destroyed, this thread's gradients lie in memory that keeps its pages.
  std::shared_ptr<void> serve_gradients();
  /// Keeps units whose reshard_after_forward is unset whole, from their first use to drop(): over
  /// the passes of a step of a pipeline.
  void hold();
  void drop() noexcept;
  /// Neither in forward nor in backward.
  bool is_idle() const { return depth_ == 0 && !task_; }

 private:
  void check_device(const ShardedUnit& unit) const;
  /// Whether other ranks wait for this one's part in a pass.
  bool is_collective() const;
  /// Null if the backend has none.
  GradientMemory* gradient_memory();
  BackwardTask& task();
  void begin_pass(ShardedUnit& root, bool reduces);
  void end_pass();
  bool runs_through_several() const;
  /// Compares notes that no later pass has compared yet.
  void settle();
  /// Forgets the passes that no backward can run through any more.
  void forget_graphs();
  void gather_ahead(ShardedUnit& unit);
  void compare_modes();
  void compare_orders(const ForwardPass& pass);

  const int64_t prefetch_;
  ProcessGroup gather_group_;
  UnitGradients::Groups reduce_groups_;
  std::vector<std::shared_ptr<ShardedUnit>> units_;
  FailedPasses failed_passes_;
  std::weak_ptr<torch::nn::Module> root_;
  std::shared_ptr<ForwardPass> pass_;  // the one that runs
  NodePtr marker_;                     // of the use that it left last
  std::vector<std::shared_ptr<ShardedUnit>> held_;
  bool is_held_ = false;
  bool expects_reduction_ = false;
  int depth_ = 0;
  bool trained_ = true;                         // the pass before: gradients were enabled
  int64_t passes_ = 0;                          // with a graph
  std::vector<size_t> expected_;                // units in the order of the pass before
  std::unordered_set<uint64_t> agreed_orders_;  // hashes of orders that all ranks had
  bool is_as_expected_ = false;
  std::vector<std::weak_ptr<ForwardPass>> graphs_;
  std::shared_ptr<GradientMemory> gradient_memory_;
  at::Tensor packed_;
  std::unique_ptr<BackwardTask> task_;
  std::shared_ptr<PassNotes> unread_;                      // notes of a pass that ended
  const std::shared_ptr<std::function<void()>> settling_;  // of GroupMonitor::add_settling()
};

}  // namespace ddp
