#pragma once

#include <vector>

#include <ddp/parallel_attention.h>
#include <ddp/parameter_layout.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace transformer {

/// Causal attention with some of the heads, whose parameters have the names of
/// torch::nn::MultiheadAttention's, so that a checkpoint loads on any number of ranks.
struct CutAttentionImpl : torch::nn::Module, ddp::ShardedModule {
  explicit CutAttentionImpl(const ddp::ParallelMultiheadAttentionOptions& options);

  void train(bool on = true) override;
  std::vector<ddp::ParameterLayout> layouts() override;

  ddp::ParallelMultiheadAttention attention;  // has the parameters, and is no module of this one
};
TORCH_MODULE(CutAttention);

}  // namespace transformer
