// Layers of the ranks of --tp that have the names and sizes of whole ones, so that a checkpoint
// loads on any number of ranks.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/parallel_attention.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace transformer {

/// Causal attention with some of the heads, whose parameters have the names of
/// torch::nn::MultiheadAttention's.
struct CutAttentionImpl : torch::nn::Module, ddp::ShardedModule {
  explicit CutAttentionImpl(const ddp::ParallelMultiheadAttentionOptions& options);

  void train(bool on = true) override;
  std::vector<ddp::ParameterLayout> layouts() override;

  ddp::ParallelMultiheadAttention attention;  // has the parameters, and is no module of this one
};
TORCH_MODULE(CutAttention);

/// A linear layer of which each rank has as many rows, and the last ones some padding.
struct CutHeadImpl : torch::nn::Module, ddp::ShardedModule {
  CutHeadImpl(const torch::nn::Linear& whole, ddp::ProcessGroup tp);

  at::Tensor forward(const at::Tensor& x);
  std::vector<ddp::ParameterLayout> layouts() override;

  const ddp::ProcessGroup tp;
  const int64_t whole_rows;
  at::Tensor weight, bias;
};
TORCH_MODULE(CutHead);

}  // namespace transformer
