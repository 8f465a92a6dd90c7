// Declares the names that the blocks of code in README.md and docs use.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <numeric>
#include <sstream>
#include <thread>
#include <vector>

#include <ddp/backend.h>
#include <ddp/collective_backend.h>
#include <ddp/ddp.h>
#include <torch/script.h>
#include <torch/torch.h>

#include "backend_stand_ins.h"

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  explicit NetImpl(int64_t inputs = 784, int64_t outputs = 10);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);  // [N, ...] to [N, outputs]
  int64_t inputs, outputs;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

/// Images of digits, in the place of a data set that has to be downloaded.
struct Digits : torch::data::datasets::Dataset<Digits> {
  torch::data::Example<> get(size_t index) override;
  torch::optional<size_t> size() const override { return 400; }
};
using Data = torch::data::datasets::MapDataset<Digits, torch::data::transforms::Stack<>>;

extern Data dataset;
extern std::unique_ptr<torch::data::StatelessDataLoader<Data, ddp::DistributedSampler>> loader;
extern ddp::DistributedDataParallel<Net> model;
extern torch::optim::SGD& optimizer;
extern torch::Device device;
extern int64_t epoch;
extern ddp::Elastic& run;
extern at::Tensor a, b, x, y, batch_loss, grad_norm;
extern double correct, samples;
Data open_or_download(const char* folder);

// Models that are cut.
extern ddp::ProcessGroup tp, cp;
extern torch::nn::LayerNorm norm;
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width);
  at::Tensor forward(at::Tensor x);  // [N, ...] to [N, width]
  at::Tensor weight;
};
TORCH_MODULE(Block);
extern ddp::FullyShardedDataParallel<Net> sharded;

// Pipelines.
struct StageImpl : torch::nn::Module {
  StageImpl(int64_t stage, int64_t stages, const ddp::ProcessGroup& tp = {});
  at::Tensor forward(at::Tensor x);
  torch::nn::Embedding embedding{nullptr};
};
TORCH_MODULE(Stage);
extern Stage layers;
extern ddp::PipelineStage<Stage>& pipeline;
extern ddp::DeviceMesh& mesh;
extern int rank, ranks;
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target);

// GANs.
extern Net generator_net, judge_net;
extern torch::optim::Adam &generator_optimizer, &judge_optimizer;
extern at::Tensor real, fake;
at::Tensor loss(const at::Tensor& output, double target);
