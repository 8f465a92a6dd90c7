#include "training.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/sampler.h>

namespace mnist {
namespace {

Tally tally(const at::Tensor& output, const at::Tensor& target, double loss_sum) {
  return {loss_sum, output.argmax(1).eq(target).sum().item<int64_t>(), target.size(0)};
}

c10::Device device_of(Net& net) { return net->fc2->weight.device(); }

}  // namespace

Tally train_step(
    Model& model, torch::optim::Optimizer& optimizer, const torch::data::Example<>& batch) {
  const auto device = device_of(model->module());
  const auto target = batch.target.to(device);
  optimizer.zero_grad();
  const auto output = model->forward(batch.data.to(device));
  const auto loss = at::nll_loss(output, target);
  loss.backward();
  optimizer.step();
  return tally(output, target, loss.item<double>() * static_cast<double>(target.size(0)));
}

Tally evaluate(Net& net, examples::ImageDataset& dataset, int rank, int world_size) {
  constexpr size_t kBatch = 256;
  const c10::NoGradGuard no_grad;
  const auto device = device_of(net);
  net->eval();

  ddp::DistributedEvalSampler sampler(
      *dataset.size(), ddp::DistributedEvalSamplerOptions().rank(rank).num_replicas(world_size));
  Tally total;
  while (const auto indices = sampler.next(kBatch)) {
    const auto batch = dataset.get_batch(*indices);
    const auto target = batch.target.to(device);
    const auto output = net->forward(batch.data.to(device));
    const auto loss_sum = at::nll_loss(output, target, {}, at::Reduction::Sum).item<double>();
    total += tally(output, target, loss_sum);
  }
  return total;
}

}  // namespace mnist
