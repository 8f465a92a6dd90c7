#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/detail/stage_module.h>

namespace ddp {

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

}  // namespace ddp
