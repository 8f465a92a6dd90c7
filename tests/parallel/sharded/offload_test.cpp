// Shards in host memory, on a device that runs nothing before it is waited for: a missing wait, or
// memory that is freed too early, shows as NaN. All ranks of its groups have what this one has.
#include <ddp/ddp.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/pretended_capture.h"
#include "support/ranks.h"
#include "support/toy_device.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace ddp::testing {
namespace {

using Net = FullyShardedDataParallel<torch::nn::Sequential>;

/// A device for each rank, as autograd has a thread for each.
c10::Device device_of(const Rank& self) {
  return {at::kPrivateUse1, static_cast<c10::DeviceIndex>(self.rank)};
}

bool is_pinned(const at::Tensor& t) {
  auto& device = toy::Device::get();
  const std::lock_guard lock(device.mutex);
  return t.is_cpu() && device.pinned.count(t.storage().data()) > 0;
}

struct Training {
  FullyShardedOptions options;
  int steps = 4;
  int micro_batches = 1;
  bool reduces_each = true;
  bool sets_to_none = true;
  bool evaluates_between = false;
  bool clips = false;
  bool scales = false;
  int replicas = 1;
  int64_t width = 6;
  std::function<void(Net&, c10::Device)> after_step = [](Net&, c10::Device) {};
};

torch::nn::Sequential layers(
    int64_t width, c10::Device device, const FullyShardedOptions& options) {
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) {
    torch::nn::Linear layer(width, width);
    const torch::NoGradGuard no_grad;
    layer->weight.copy_(torch::linspace(-1, 1 + i, width * width).sin().view({width, width}));
    layer->bias.copy_(torch::linspace(-1, 1, width));
    layer->to(device);
    net->push_back(layer);
    net->push_back(torch::nn::Tanh());
  }
  fully_shard_children(net, options);
  return net;
}

/// Outputs of evaluations, and the parameters after the last step with their gradients.
std::vector<at::Tensor> train(const Training& training, const Rank& self, c10::Device device) {
  auto options = training.options;
  if (training.replicas == 1) {
    options.process_group(self.group);
  } else {
    const int shards = self.size / training.replicas;
    options.mesh(init_device_mesh({training.replicas, shards}, {"replicas", "shards"}, self.group));
  }
  Net model(layers(training.width, device, options), options);
  torch::optim::SGD optimizer(
      model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  GradScaler scaler(GradScalerOptions().enabled(training.scales).found_inf_groups({self.group}));
  std::vector<at::Tensor> values;
  for (int step = 0; step < training.steps; ++step) {
    optimizer.zero_grad(training.sets_to_none);
    for (int micro = 0; micro < training.micro_batches; ++micro) {
      const bool reduces = training.reduces_each || micro + 1 == training.micro_batches;
      const auto inputs = torch::linspace(-1, 1 + step + micro, 2 * training.width);
      const auto x = inputs.view({2, training.width}).to(device);
      const auto loss = [&] { return scaler.scale(model->forward(x).pow(2).sum()); };
      const auto loss_without_reduction = [&] {
        const auto guard = model->no_sync();
        return loss();
      };
      (reduces ? loss() : loss_without_reduction()).backward();
    }
    scaler.unscale_(optimizer);
    if (training.clips) clip_grad_norm_(*model, 0.1);
    scaler.step(optimizer);
    if (training.scales) scaler.update();
    if (training.evaluates_between) {
      const torch::NoGradGuard no_grad;
      const auto output = model->forward(torch::ones({2, training.width}).to(device));
      for (auto& p : model->parameters()) p.mul_(0.99);  // on the host, where shards are offloaded
      values.push_back(toy::on_host(output));
    }
    training.after_step(model, device);
  }
  for (const auto& p : model->parameters()) {
    values.push_back(toy::on_host(p.detach()));
    values.push_back(toy::on_host(p.grad()));
  }
  return values;
}

/// Whether all ranks have on the device, with shards on the host, the numbers of the CPU.
bool equals_cpu(int ranks, const Training& training) {
  auto offloads = training;
  offloads.options.cpu_offload(true);
  const auto equal = run_ranks<int>(ranks, toy::over_echo(), [&](const Rank& self) {
    const auto on_device = train(offloads, self, device_of(self));
    return all_equal(on_device, train(training, self, at::kCPU)) ? 1 : 0;
  });
  return std::count(equal.begin(), equal.end(), 1) == ranks;
}

}  // namespace

TEST_CASE("shards on the host train to equal bits", "[offload][ranks]") {
  const int ranks = GENERATE(1, 2);
  Training training;
  training.options.prefetch(GENERATE(0, 1)).reshard_after_forward(GENERATE(true, false));
  CAPTURE(ranks, training.options.prefetch(), *training.options.reshard_after_forward());
  CHECK(equals_cpu(ranks, training));
}

TEST_CASE("shards on the host take other dtypes on the device", "[offload][ranks]") {
  const int ranks = GENERATE(1, 2);
  Training training;
  training.options.mp_policy(MixedPrecisionPolicy()
                                 .gather_int8(GENERATE(false, true))
                                 .param_dtype(at::kBFloat16)
                                 .reduce_dtype(GENERATE(at::kFloat, at::kBFloat16)));
  CHECK(equals_cpu(ranks, training));
}

TEST_CASE("gradients accumulate on the host", "[offload][ranks]") {
  const int ranks = GENERATE(1, 2);
  Training training;
  training.micro_batches = 3;
  training.reduces_each = GENERATE(true, false);
  training.sets_to_none = GENERATE(true, false);
  CAPTURE(ranks, training.reduces_each, training.sets_to_none);
  CHECK(equals_cpu(ranks, training));
}

TEST_CASE("the host writes shards that a forward pass read before", "[offload][ranks]") {
  Training training;
  training.evaluates_between = true;
  CHECK(equals_cpu(2, training));
}

TEST_CASE("gradients on the host are clipped, and scaled", "[offload][ranks]") {
  Training training;
  training.clips = true;
  training.scales = GENERATE(false, true);
  CHECK(equals_cpu(2, training));
}

TEST_CASE("replicas of shards on the host train", "[offload][ranks]") {
  Training training;
  training.replicas = 2;
  CHECK(equals_cpu(2, training));
}

TEST_CASE("shards, gradients and state rest in pinned memory", "[offload][ranks]") {
  Training training;
  training.options.cpu_offload(true);
  training.width = 40;  // smaller gradients may lie elsewhere
  training.after_step = [](Net& model, c10::Device) {
    for (const auto& p : model->parameters()) {
      TORCH_CHECK(is_pinned(p), "a parameter on ", p.device());
      TORCH_CHECK(p.numel() < 1600 ? p.grad().is_cpu() : is_pinned(p.grad()), "a gradient");
    }
  };
  auto& device = toy::Device::get();
  device.forget();
  run_ranks<int>(1, toy::over_echo(), [&](const Rank& self) {
    train(training, self, device_of(self));
    return 0;
  });
  // A step copies each unit up for forward and for backward, and its gradients down.
  int up_or_down = 0;
  for (const auto& copy : device.copies) {
    if (!copy.non_blocking) continue;
    ++up_or_down;
    CHECK(copy.pinned);
    CHECK(copy.stream == toy::kPoolStream);
  }
  CHECK(up_or_down == training.steps * 4 * 3);
}

TEST_CASE("a pass that throws leaves shards on the host", "[offload][ranks]") {
  Training training;
  training.after_step = [](Net& model, c10::Device device) {
    const auto of_other_width = torch::ones({2, 5}).to(device);
    TORCH_CHECK(!error_of([&] { (void)model->forward(of_other_width); }).empty(), "no error");
    const torch::NoGradGuard no_grad;
    for (auto& p : model->parameters()) p.mul_(0.99);
  };
  CHECK(equals_cpu(1, training));
}

TEST_CASE("writes to whole parameters come to shards on the host", "[offload][ranks]") {
  Training training;
  if (GENERATE(false, true)) {
    training.options.mp_policy(MixedPrecisionPolicy().param_dtype(at::kBFloat16));
  }
  training.after_step = [](Net& model, c10::Device) {
    const SummonFullParams whole(*model, /*write_back=*/true);
    const torch::NoGradGuard no_grad;
    for (auto& p : model->parameters()) {
      if (p.dim() == 2) p[0].mul_(0.5);
    }
  };
  CHECK(equals_cpu(1, training));
}

TEST_CASE("shards on the host are saved, and loaded elsewhere", "[offload][ranks]") {
  const auto equal = run_ranks<int>(1, toy::over_echo(), [&](const Rank& self) {
    auto options = FullyShardedOptions().process_group(self.group);
    Net model(layers(6, at::kCPU, options), options);
    options.cpu_offload(true);
    Net offloaded(layers(6, device_of(self), options), options);
    {
      const torch::NoGradGuard no_grad;
      for (auto& p : offloaded->parameters()) p.zero_();
    }
    load_full_state_dict(*offloaded, full_state_dict(*model, 0, self.group), self.group);
    const auto x = torch::ones({2, 6});
    const auto output = toy::on_host(offloaded->forward(x.to(device_of(self))));
    const auto dict = full_state_dict(*offloaded, 0, self.group);
    const bool are_equal =
        all_equal({output.detach()}, {model->forward(x).detach()}) &&
        all_equal(dict.values(), full_state_dict(*model, 0, self.group).values());
    return are_equal ? 1 : 0;
  });
  CHECK(equal == std::vector<int>{1});
}

TEST_CASE("shards on the host that are moved are an error", "[offload][errors][ranks]") {
  const auto error = error_of_all(1, toy::over_echo(), [](const Rank& self) {
    const auto options = FullyShardedOptions().process_group(self.group).cpu_offload(true);
    auto net = layers(6, device_of(self), options);
    Net model(net, options);
    auto weight = model->parameters()[0];
    weight.set_data(weight.to(device_of(self)));
    (void)model->forward(torch::ones({2, 6}).to(device_of(self)));
  });
  CHECK_THAT(
      error, ContainsText("expected parameters in host memory between steps, where cpu_offload "
                          "keeps them, got weight in 0 on toy:0 on rank 0 of 1"));
}

TEST_CASE("a step on shards on the host is not captured", "[offload][errors][ranks]") {
  const auto texts = run_ranks<std::vector<std::string>>(1, toy::over_echo(), [](const Rank& self) {
    std::vector<std::string> errors;
    for (const bool offloads : {true, false}) {
      const auto options = FullyShardedOptions().process_group(self.group).cpu_offload(offloads);
      Net model(layers(6, device_of(self), options), options);
      const auto forward = [&] { (void)model->forward(torch::ones({2, 6}).to(device_of(self))); };
      RankBarrier barrier(1);
      {
        const Capture capture(barrier);
        errors.push_back(error_of(forward));
      }
      forward();
    }
    return errors;
  });
  CHECK_THAT(
      texts[0][0], ContainsText("expected a step that runs, because the optimizer of a unit with "
                                "cpu_offload steps on the host, got one that is captured") &&
                       ContainsText("on rank 0 of 1. Leave out cpu_offload, or the CapturedStep."));
  CHECK(texts[0][1].empty());
}

TEST_CASE("cpu_offload of a module on the CPU changes nothing, and says so", "[offload][ranks]") {
  const auto training = [](bool offloads) {
    Training on_cpu;
    on_cpu.options.cpu_offload(offloads);
    return run_ranks<std::vector<at::Tensor>>(
        2, [&](const Rank& self) { return train(on_cpu, self, at::kCPU); });
  };
  const auto with = training(true), without = training(false);
  for (size_t rank = 0; rank < 2; ++rank) CHECK(all_equal(with[rank], without[rank]));
  const WarnAlways always;
  const auto warnings_on = [](c10::DeviceType type) {
    return run_ranks<int>(1, toy::over_echo(), [&](const Rank& self) {
      const Warnings warnings;
      const auto options = FullyShardedOptions().process_group(self.group).cpu_offload(true);
      const auto device = type == at::kCPU ? c10::Device(at::kCPU) : device_of(self);
      const Net model(layers(6, device, options), options);
      return warnings.count("cpu_offload(true) changes nothing for parameters on CPUs");
    })[0];
  };
  CHECK(warnings_on(at::kCPU) > 0);
  CHECK(warnings_on(at::kPrivateUse1) == 0);
}

}  // namespace ddp::testing
