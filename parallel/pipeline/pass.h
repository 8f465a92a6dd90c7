#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/detail/stage_module.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/pipeline.h>

#include "pipeline/action_events.h"
#include "pipeline/messages/host_messages.h"
#include "pipeline/messages/message_header.h"
#include "pipeline/messages/streamed_messages.h"
#include "pipeline/messages/wire.h"
#include "pipeline/microbatches.h"
#include "pipeline/schedule.h"

namespace ddp {

/// The setup of one rank, which stays the same from step to step.
struct PipelineSetup {
  ProcessGroup group;
  std::shared_ptr<GroupMonitor> monitor;
  MessageGroups messages;
  KnownHeaders known;  // where messages go on streams
  PipelineShape shape;
  int64_t rank = 0;
  int64_t calls = 0;               // step() and eval() until now
  std::vector<std::string> ranks;  // of the group, in the job: "rank 5 of 8 (pp 1, dp 0, tp 1)"
  std::vector<detail::StageModule> chunks;
  LossFn loss;
  PipelineOptions options;
  /// By chunk: tensors that its forward could use, for errors about others.
  std::vector<std::vector<TensorDescription>> usable;

  std::string on_rank() const;
};

/// Where the stages of a rank are: modules may move between two passes.
at::Device device_of_chunks(const std::vector<detail::StageModule>& chunks);

/// One of a rank's stages in one step: runs its forwards and backwards, and keeps between them what
/// backward needs.
class StageChunk {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// \param backwards  of the step.
  /// \param reduces_each  whether a wrapper reduces in each backward, and not in the last.
  StageChunk(const detail::StageModule& module, int64_t backwards, bool reduces_each);

  /// \param inputs  their graphs end here: forward gets leaves.
  /// \return  what forward returns; unset if it does not take as many tensors.
  std::optional<Tensors> forward(int64_t microbatch, const Tensors& inputs);

  /// Keeps the graph of tensors, and not their memory, for backward().
  ///
  /// \param outputs  of the micro-batch's forward, or what is computed from them.
  void keep_graph(int64_t microbatch, const Tensors& outputs);

  /// \param gradients  of the outputs that were kept; undefined: none.
  /// \return  the gradients of the inputs; undefined: none.
  Tensors backward(int64_t microbatch, const Tensors& gradients);

 private:
  struct Kept {
    Tensors inputs;
    Tensors outputs;                          // empty, but for the graph; undefined without one
    std::vector<std::vector<int64_t>> sizes;  // of outputs
  };

  void sync(const Kept& kept, Tensors& gradients);

  const detail::StageModule& module_;
  const bool reduces_each_;
  int64_t backwards_left_;
  const detail::StageUse use_;
  std::map<int64_t, Kept> kept_;  // by micro-batch
};

/// One step on one rank, or one evaluation: obeys a list.
class PipelinePass {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// \param target  undefined in an evaluation.
  PipelinePass(PipelineSetup& setup, bool trains, const Tensors& inputs, const at::Tensor& target);

  /// Gradients are enabled if it trains.
  PipelineResult run(const PipelineList& list);

  /// When the actions ran.
  QueuedStep times() const { return {times_, events_}; }

 private:
  void begin(const PipelineList& list);
  /// Describes the batch of the first stage, and what else the sizes of messages depend on.
  std::string batch_text() const;
  void begin_messages(const PipelineList& list);
  void forward(const PipelineStep& step);
  void backward(const PipelineStep& step);
  Tensors run_forward(const PipelineStep& step, const Tensors& inputs);
  /// Computes the loss of a micro-batch, and keeps its graph.
  void add_loss(const PipelineAction& action, const at::Tensor& output);
  Tensors receive(const PipelineStep& step);
  void send(const PipelineStep& step, const Tensors& tensors);
  [[noreturn]] void explain(
      const PipelineAction& action, const Tensors& inputs, const std::string& error) const;
  void end();

  double milliseconds() const;
  /// The action's tensors have come, or will have by now on the stream.
  void mark_begin();
  void mark_end();
  bool is_filler(const PipelineAction& action) const {
    return fillers_.count(action.microbatch) > 0;
  }
  int64_t stage_of(const PipelineAction& action) const;
  std::string name_of(const PipelineAction& action) const;
  bool is_last(int64_t stage) const { return stage + 1 == setup_.shape.stages(); }
  StageChunk& chunk_of(const PipelineAction& action);
  bool has_stage(int64_t stage) const;

  PipelineSetup& setup_;
  const bool trains_;
  const Tensors inputs_;
  const at::Tensor target_;
  const StageWire wire_;
  std::unique_ptr<StageMessages> messages_;
  size_t at_ = 0;  // the step of the list
  std::vector<std::unique_ptr<StageChunk>> chunks_;
  Microbatches input_parts_, target_parts_;
  std::set<int64_t> fillers_;  // micro-batches whose outputs are left out
  std::map<std::tuple<char, int64_t, int64_t>, Tensors> handed_;  // to a stage of the same rank
  std::vector<Tensors> input_gradients_;                          // by micro-batch
  Tensors losses_, loss_gradients_, outputs_;                     // by micro-batch; of fillers none
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  PipelineStepStats times_;
  std::shared_ptr<ActionEvents> events_;  // where messages go on a device's streams
};

}  // namespace ddp
