#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/gradient_shards.h>
#include <ddp/process_group.h>
#include <ddp/zero.h>
#include <torch/optim/optimizer.h>

#include "shard_layout.h"

namespace ddp {

/// Parameters that lie one after another in one piece of memory, which is gathered in one call.
struct ShardChunk {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> places;  // in `memory`, by parameter
  at::Tensor memory;               // 1-D: world-size slices
  at::Tensor own;                  // this rank's slice of it
  std::vector<ShardPiece> pieces;  // of `own`; only what is to be stepped
  std::vector<at::Tensor> values;  // by piece: the parameter that the optimizer of the part has
  GradientShard* shard = nullptr;  // where the averages are with stage 2
  std::vector<char> reported;      // by parameter, with overlap: reduced in this pass
  size_t missing = 0;              // of those
};

/// The optimizer of this rank's part, and the memory that all parameters lie in.
class ShardedOptimizer {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  /// \param chunks  of parameters; each in the order of its memory.
  /// \param groups  the whole, with its options; parameters in no chunk are not stepped.
  ShardedOptimizer(
      ProcessGroup group, std::vector<std::vector<at::Tensor>> chunks, const Groups& groups,
      const torch::optim::OptimizerOptions& defaults, detail::ZeroKind kind);

  const ProcessGroup& group() const { return group_; }
  std::vector<ShardChunk>& chunks() { return chunks_; }
  const std::vector<ShardChunk>& chunks() const { return chunks_; }

  /// Takes the options of the whole for the steps to come.
  void set_options(const Groups& groups);
  /// Steps this rank's pieces of the chunk, or of all, that have a gradient.
  void step();
  void step(ShardChunk& chunk);
  /// Sends everybody the chunk's new values.
  c10::intrusive_ptr<c10d::Work> gather(ShardChunk& chunk);
  /// Behind that.
  static void mark_changed(const ShardChunk& chunk);

  /// Gives `whole`, an optimizer of the parameters without state, all of it; null on ranks that
  /// want none.
  ///
  /// Collective: yes.
  void collect_state(torch::optim::Optimizer* whole) const;
  void take_state(const torch::optim::Optimizer& whole);
  size_t state_bytes() const;

 private:
  void lay_out(ShardChunk& chunk) const;
  static void move_in(const ShardChunk& chunk);
  torch::optim::OptimizerParamState* state_of(const at::Tensor& value) const;
  at::Tensor gather_facts() const;
  at::Tensor gather_state(const ShardChunk& chunk, size_t part) const;

  const ProcessGroup group_;
  const detail::ZeroKind kind_;
  std::vector<ShardChunk> chunks_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

/// Gradients of the chunk's pieces, by piece; undefined where there is none.
std::vector<at::Tensor> gradients_of(const ShardChunk& chunk);

}  // namespace ddp
