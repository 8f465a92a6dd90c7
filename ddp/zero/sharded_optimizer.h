#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ddp/internal/flat_parameters.h>
#include <ddp/internal/gradient_shards.h>
#include <ddp/internal/reducer.h>
#include <ddp/process_group.h>
#include <ddp/zero.h>
#include <torch/optim/optimizer.h>

namespace ddp {

/// Parameters by chunk, each chunk in the order of its memory. A chunk is gathered in one call;
/// FlatLayout::pieces() cuts it into the parts of the ranks.
using Chunks = std::vector<std::vector<at::Tensor>>;

/// One chunk for each bucket of the reducer (stage 2).
///
/// \param buckets  indices into `parameters`.
Chunks chunks_of_buckets(
    const std::vector<std::vector<size_t>>& buckets, const std::vector<NamedParameter>& parameters);

/// Chunks of those of `parameters` that an optimizer with these groups steps (stage 1): of 2 MiB,
/// but of 25 MiB over a backend whose collectives only the stream waits for, which gathers without
/// a copy, and pays for each collective.
Chunks chunks_of_groups(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const std::vector<NamedParameter>& parameters, bool waits_on_stream);

/// Parameters that one all-gather fills.
struct ShardChunk {
  FlatParameters flat;
  std::vector<ShardPiece> pieces = {};  // of the shard; without parameters that are not stepped
  std::vector<at::Tensor> values = {};  // by piece: its values, a parameter of the part's optimizer
  GradientShard* shard = nullptr;       // this rank's averages, with stage 2
  std::vector<char> reported = {};      // by parameter, with overlap: 1 where reduced in this pass
  size_t missing = 0;                   // parameters that are not reported yet
};

/// The optimizer of this rank's part, and the memory of all parameters.
class ShardedOptimizer {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  /// \param groups  of the whole optimizer, with options; parameters in no chunk are not stepped.
  ShardedOptimizer(
      ProcessGroup group, Chunks chunks, const Groups& groups,
      const torch::optim::OptimizerOptions& defaults, detail::ZeroKind kind);

  const ProcessGroup& group() const { return group_; }
  std::vector<ShardChunk>& chunks() { return chunks_; }
  const std::vector<ShardChunk>& chunks() const { return chunks_; }

  torch::optim::Optimizer& local() { return *optimizer_; }
  /// Copies the options of the whole optimizer for the following steps.
  void set_options(const Groups& groups);
  /// Steps this rank's pieces of the chunk, or of all, that have a gradient.
  void step();
  void step(ShardChunk& chunk);
  /// Raises the parameters' versions; call it after the gather.
  static void mark_changed(const ShardChunk& chunk);

  /// Fills `whole`, an optimizer of the parameters without state, with the whole state; null on
  /// ranks that do not need it.
  ///
  /// Collective: yes.
  void collect_state(torch::optim::Optimizer* whole) const;
  void load_state(const torch::optim::Optimizer& whole);
  /// See zero_shards.h; `groups` number the parameters.
  c10::IValue own_state(const Groups& groups) const;
  void take_state(const Groups& groups, const c10::IValue& shard);
  size_t state_bytes() const;

 private:
  torch::optim::OptimizerParamState* state_of(const at::Tensor& value) const;
  at::Tensor gather_state_table() const;
  at::Tensor gather_state(const ShardChunk& chunk, size_t part) const;

  const ProcessGroup group_;
  const detail::ZeroKind kind_;
  std::vector<ShardChunk> chunks_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

/// Gradients of the chunk's pieces, by piece; undefined where there is none.
std::vector<at::Tensor> gradients_of(const ShardChunk& chunk);

}  // namespace ddp
