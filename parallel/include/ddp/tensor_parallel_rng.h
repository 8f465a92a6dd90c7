#pragma once

#include <cstdint>
#include <memory>

#include <ddp/export.h>
#include <ddp/process_group.h>

namespace ddp {

/// While it exists, the default generators draw numbers of their own on each rank of a group.
///
/// For dropout between a ColumnParallelLinear and a RowParallelLinear, where each rank has other
/// features. Outside of it all ranks of the group draw the same numbers, as dropout needs where
/// they have the same features:
///
///     auto h = up->forward(x);
///     {
///       ddp::TensorParallelRng own(tp);
///       h = torch::dropout(h, 0.1, is_training());
///     }
///     return down->forward(h);
///
/// The numbers of a group go on where the last guard over it left them. Its first one seeds them
/// from a hash of the default generator's seed and the rank; torch::manual_seed() later on does not
/// change them, manual_seed() does. checkpoint() repeats them, and a Checkpointer saves them: they
/// load into groups of the same ranks, and begin with their seed in others.
///
/// Of the CPU, and of the current CUDA device. Within another guard of the same group it does
/// nothing; within one of another group it is an error.
///
/// Threads: the generators belong to the process.
/// Source: Megatron-LM, core/tensor_parallel/random.py.
class DDP_API [[nodiscard]] TensorParallelRng {
 public:
  /// Over these ranks.
  explicit TensorParallelRng(const GroupArg& group = {});
  ~TensorParallelRng();
  C10_DISABLE_COPY_AND_ASSIGN(TensorParallelRng);

  /// Begins the group's numbers anew, as its first guard after torch::manual_seed(seed) does.
  ///
  /// \throws c10::Error  within a guard.
  ///
  /// Collective: no, but call it on every rank with one seed.
  static void manual_seed(uint64_t seed, const GroupArg& group = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
