#pragma once

#include <string>

#include <ddp/process_group.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace cifar10 {

/// The shape of a residual network.
struct NetOptions {
  std::vector<int64_t> widths;  // channels by stage; each stage but the first halves the image
  int64_t blocks = 1;           // blocks in each stage
  bool batch_norm = true;
  int64_t classes = 10;
  // Normalize over the batches of all ranks of the group.
  bool sync_batch_norm = false;
  ddp::GroupArg group = {};
};

/// "small" (78 thousand parameters, a third of a megabyte of gradients) or "resnet18" (11 million,
/// 45 MB).
///
/// \throws c10::ValueError  another name.
NetOptions net_options(const std::string& model);

/// A residual network for small images (He et al., arXiv:1512.03385): [N, 3, 32, 32] images to
/// [N, classes] logits.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const NetOptions& options);

  at::Tensor forward(const at::Tensor& images);

  torch::nn::Sequential stem, stages;
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

}  // namespace cifar10
