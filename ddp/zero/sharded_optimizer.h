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

#include "zero/host_staging.h"
#include "zero/state_file.h"

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
///
/// \param whole_over  ranks that divide whole parameters; then a chunk may have the largest one for
///        each of them. 1: elements are divided.
Chunks chunks_of_groups(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const std::vector<NamedParameter>& parameters, bool waits_on_stream, int whole_over);

/// Parameters that one all-gather fills.
struct ShardChunk {
  FlatParameters flat;
  std::vector<ShardPiece> pieces = {};  // of the shard; without parameters that are not stepped
  std::vector<at::Tensor> values = {};  // by piece: its values, a parameter of the part's optimizer
  GradientShard* shard = nullptr;       // this rank's averages, with stage 2
  std::vector<char> reported = {};      // by parameter, with overlap: 1 where reduced in this pass
  size_t missing = 0;                   // parameters that are not reported yet
};

/// A piece of a chunk, by its index there.
struct PieceOfChunk {
  ShardChunk* chunk;
  size_t index;
  at::Tensor gradient = {};

  const ShardPiece& piece() const { return chunk->pieces[index]; }
  const at::Tensor& value() const { return chunk->values[index]; }
  /// This rank's elements of the parameter, where the model has them.
  at::Tensor parameter() const {
    return chunk->flat.shard().narrow(0, piece().at, piece().numel).detach();
  }
};

inline bool is_offloaded(const ZeroOptions& options) {
  return options.offload() || options.offload_file().has_value();
}

/// The optimizer of this rank's part, and the memory of all parameters.
///
/// With offload the values of parameters on devices are on the host during a step alone: it copies
/// them and the gradients down and the new parameters up, by windows of a few MiB. With a file the
/// state of a window moves there after the window's first step.
class ShardedOptimizer {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  /// \param groups  of the whole optimizer, with options; parameters in no chunk are not stepped.
  /// \throws c10::Error  the file of `options` cannot be made.
  ShardedOptimizer(
      ProcessGroup group, Chunks chunks, const Groups& groups,
      const torch::optim::OptimizerOptions& defaults, detail::ZeroKind kind,
      const ZeroOptions& options);

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
  /// See ZeroRedundancyOptimizerBase::balance().
  double balance() const;

 private:
  using Pieces = std::vector<PieceOfChunk>;

  FlatParameters flat_of(std::vector<at::Tensor> parameters, std::vector<int64_t>& loads) const;
  std::vector<ShardPiece> pieces_of(const FlatParameters& flat) const;
  /// Makes an optimizer of the values in the groups.
  std::unique_ptr<torch::optim::Optimizer> make(
      const Groups& own, const torch::optim::OptimizerOptions& defaults) const;
  /// Makes the optimizer with states in their places, also those that it makes at once.
  void make_offloaded(const Groups& own, const torch::optim::OptimizerOptions& defaults);
  /// The tensors of a state that a step of a group with these options needs, by tensor.
  std::vector<char> needed_tensors(const torch::optim::OptimizerOptions& options) const;
  Pieces all_pieces();
  static std::vector<Pieces> windows_of(Pieces pieces);
  /// Steps pieces, which have gradients.
  void step(Pieces pieces);
  void step_by_windows(const std::vector<Pieces>& windows);
  bool is_staged(const ShardChunk& chunk) const;
  std::vector<StagedPiece> staged(const Pieces& window) const;
  /// Moves the piece's state to the host or into the file, where it belongs and is not.
  void keep_state(const PieceOfChunk& piece, torch::optim::OptimizerParamState& state);
  void keep_loaded(const PieceOfChunk& piece, torch::optim::OptimizerParamState& state);
  /// The same for those of a window, and begins to write them to the file's disk.
  void keep_states(const Pieces& window);
  torch::optim::OptimizerParamState* state_of(const at::Tensor& value) const;
  at::Tensor gather_state_table() const;
  at::Tensor gather_state(const ShardChunk& chunk, size_t part) const;

  const ProcessGroup group_;
  const detail::ZeroKind kind_;
  std::vector<ShardChunk> chunks_;
  detail::WholeTensors places_;           // by value, where it has whole parameters
  std::unique_ptr<HostStaging> staging_;  // with offload
  std::unique_ptr<StateFile> file_;       // with a file
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

/// The chunk's pieces, one for each parameter: offload cuts large ones, and a norm that adds up
/// other pieces would have other bits.
std::vector<ShardPiece> joined_pieces(const ShardChunk& chunk);

/// Gradients of pieces of the chunk, by piece; undefined where there is none.
std::vector<at::Tensor> gradients_of(
    const ShardChunk& chunk, const std::vector<ShardPiece>& pieces);

}  // namespace ddp
