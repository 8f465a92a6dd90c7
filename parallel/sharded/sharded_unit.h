#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/fully_sharded.h>
#include <ddp/parameter_layout.h>
#include <torch/csrc/autograd/graph_task.h>

#include "sharded/flat_segment.h"
#include "sharded/unit_gradients.h"

namespace ddp {

/// As torch::autograd::get_current_graph_task_exec_info() has it.
using Wanted = std::unordered_map<torch::autograd::Node*, torch::autograd::GraphTask::ExecInfo>;

using Nodes = std::unordered_set<torch::autograd::Node*>;

class ShardedModel;

/// The parameters of one FullyShardedDataParallel: their memory and their gradients.
///
/// The parameters' sizes and the memory of the whole are apart: in backward the memory is freed
/// when nothing reads it any more, and gradients that are still on their way need the sizes.
class ShardedUnit : public std::enable_shared_from_this<ShardedUnit> {
 public:
  /// Collective: yes.
  ///
  /// \param layouts  of the parameters, in order.
  ShardedUnit(const std::vector<ParameterLayout>& layouts, const FullyShardedOptions& options);
  ~ShardedUnit();
  C10_DISABLE_COPY_AND_ASSIGN(ShardedUnit);

  /// Calls `on_gradient` when a parameter has its gradient of a backward pass.
  void add_hooks();

  std::string name() const { return stats.name.empty() ? "the root" : stats.name; }
  std::vector<ParameterLayout> layouts() const;

  bool is_whole() const { return memory_ == Memory::Full; }
  bool is_free() const { return memory_ == Memory::Free; }
  /// Starts to gather the parameters, unless they are there or on their way.
  ///
  /// \param exactly  what the shards have, also where gathers are quantized.
  ///
  /// Collective: yes. Blocks: no.
  void begin_gather(bool exactly = false);
  /// Gathers the parameters, and gives them their sizes.
  void make_whole();
  /// The same with what the shards have: gathers once more what was quantized.
  void make_whole_exactly();
  /// Frees the whole parameters. Their sizes stay. This and what follows, but part_with_whole() and
  /// abandon(), keeps what a program wrote to them.
  void release();
  /// Frees the whole parameters, and makes them the shards.
  void reshard();
  /// Makes the parameters the shards, and keeps the memory of the whole, if it is there.
  void hide_whole();
  /// Makes the parameters the shards, and leaves the memory of the whole to values that a program
  /// computed from it outside of forward.
  void part_with_whole();
  /// Makes the parameters the shards after a failure; does not wait for a gather.
  void abandon() noexcept;
  /// Waits until gathers have read shards on the host: at the end of a pass, before the program may
  /// write them.
  void await_uploads();
  /// Copies what a program wrote to the whole parameters into the shard.
  ///
  /// \throws c10::Error  for a parameter of another size.
  void write_back();
  /// Whether autograd wants gradients of the parameters to be accumulated.
  bool takes_gradients(const Wanted& wanted) const;
  /// Throws where shards rest on the host, and the device records a graph: that would repeat
  /// neither the optimizer's steps there nor the waits for them.
  void check_may_capture() const;
  bool has_memory_of(const at::Tensor& tensor) const;
  /// The parameters that a graph computed with as shards, by their numbers in gradients().
  std::vector<bool> used_shards() const;
  /// Throws where a backward pass through `nodes` comes to a parameter as a shard.
  void refuse_shards_in(const Nodes& nodes) const;
  // Names parameter i, as UnitGradients counts.
  std::string text_of_parameter(size_t i) const;

  bool has_parameters() const { return !segments_.empty(); }
  /// The device of its parameters; where it has none, of the model's.
  c10::Device device() const;
  UnitGradients& gradients() { return *gradients_; }
  const UnitGradients& gradients() const { return *gradients_; }
  /// The program's, which say how the parameters are cut.
  const UnitGradients::Groups& groups() const { return groups_; }
  const ProcessGroup& gather_group() const { return gather_group_; }

  /// Its number among all units over the same ranks, from 1, the same on all ranks.
  int64_t number() const { return number_; }

  size_t index = 0;  // in the model
  /// \throws c10::Error  when the root is gone.
  std::shared_ptr<ShardedModel> model() const;
  void set_model(const std::shared_ptr<ShardedModel>& model) { model_ = model; }
  std::optional<bool> reshard_after_forward;
  bool owes_reduction = false;  // a pass without reduction called it
  bool stays_whole = false;     // by unshard()
  int64_t needed_since = 0;     // in backward: not needed when all uses entered since are done
  UnitStats stats;

 private:
  class BeforeGradient;
  class AfterGradient;
  class ShardNode;
  enum class Memory { Free, Filling, Full };

  void group_into_segments(const FullyShardedOptions& options);
  void end_gather();  // of all segments; an error names the unit
  std::string gathering_text() const;
  void check_rests_in_place() const;
  void keep_writes();
  void point_at_shards();
  void check_takes_gradients() const;
  [[noreturn]] void refuse_gradient_of_shard(size_t i) const;
  void check_is_untouched(size_t i) const;
  void check_is_dense(size_t i) const;

  std::weak_ptr<ShardedModel> model_;  // which has this
  UnitGradients::Groups groups_;
  ProcessGroup gather_group_;
  int64_t number_ = 0;
  std::vector<ParameterLayout> whole_layouts_;  // of the parameters before they were cut
  std::vector<FlatSegment> segments_;
  std::vector<size_t> places_;  // by layout: its number through all segments
  std::unique_ptr<UnitGradients> gradients_;
  std::vector<NodePtr> hooked_;  // by the numbers of UnitGradients; null without hooks
  Memory memory_ = Memory::Free;
  bool has_whole_sizes_ = false;
};

}  // namespace ddp
