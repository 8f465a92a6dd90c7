// State that is kept from step to step is, after a step that a GradScaler skips, as if the step had
// not been taken, on every rank.
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/archives.h"
#include "support/catch.h"
#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"

namespace {

using namespace ddp;
using namespace ddp::testing;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kOverflow = 5;  // the step whose gradients are not finite
constexpr int kStepsInAll = 12;

using Net = torch::nn::Sequential;
using Model = DistributedDataParallel<Net>;
using OptimizerPtr = std::shared_ptr<torch::optim::Optimizer>;

/// An overflow in the gradient of one parameter, on rank 1.
struct Overflow {
  size_t parameter = 0;
  float value = kInfinity;
  bool is_everywhere = false;  // false: in one element
};

/// The hook, optimizer or averager with which a model trains.
struct Memory {
  std::function<void(Model&, const Rank&)> attach = [](Model&, const Rank&) {};
  std::function<OptimizerPtr(Model&)> optimizer = [](Model& model) {
    return std::make_shared<torch::optim::SGD>(
        model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  };
};

struct End {
  std::string steps;  // "+" for a taken step, "-" for a skipped one
  at::Tensor values;
  double scale = 0;
};

Net make_net() {
  Net net(torch::nn::Linear(8, 6), torch::nn::Tanh(), torch::nn::Linear(6, 6));
  set_waves(*net, {0.7, 0, 1, 0.5});
  return net;
}

/// \param overflow  null: the step is left out.
/// \param new_scale  of every step; unset: the scaler decides.
End train(
    const Rank& self, const Memory& memory, const Overflow* overflow,
    std::optional<double> new_scale) {
  auto net = make_net();
  Model model(net, DistributedDataParallelOptions().process_group(self.group).bucket_cap_mb(25));
  memory.attach(model, self);
  auto optimizer = memory.optimizer(model);
  GradScaler scaler(GradScalerOptions().init_scale(1024));
  int step = 0;
  if (self.rank == 1 && overflow) {
    net->parameters()[overflow->parameter].register_hook([&step, overflow](at::Tensor gradient) {
      if (step != kOverflow) return gradient;
      gradient = gradient.clone();
      auto part = overflow->is_everywhere ? gradient.flatten() : gradient.flatten().narrow(0, 3, 1);
      part.fill_(overflow->value);
      return gradient;
    });
  }
  End end;
  for (; step < kStepsInAll; ++step) {
    if (step == kOverflow && !overflow) continue;
    if (auto* sharded = dynamic_cast<ZeroRedundancyOptimizerBase*>(optimizer.get())) {
      sharded->zero_grad();
    } else {
      optimizer->zero_grad();
    }
    const auto x = torch::sin(torch::arange(40) * (0.3 + self.rank) + step).view({5, 8});
    scaler.scale(model->forward(x).square().mean()).backward();
    end.steps += scaler.step(*optimizer) ? '+' : '-';
    scaler.update(new_scale);
  }
  end.values = flattened(net->parameters());
  end.scale = scaler.get_scale();
  return end;
}

template <typename Hook, typename Options>
Memory of_hook(const Options& options) {
  Memory memory;
  memory.attach = [options](Model& model, const Rank& self) {
    model->register_comm_hook(Hook(options, self.group));
  };
  return memory;
}

Memory of_power_sgd(const hooks::PowerSGDOptions& options) {
  return of_hook<hooks::PowerSGD>(
      hooks::PowerSGDOptions(options).start_iter(2).min_compression_rate(0.5));
}

Memory of_zero(int stage) {
  Memory memory;
  memory.optimizer = [stage](Model& model) -> OptimizerPtr {
    return std::make_shared<ZeroRedundancyOptimizer<torch::optim::Adam>>(
        model, torch::optim::AdamOptions(0.01), ZeroOptions().stage(stage));
  };
  return memory;
}

std::map<std::string, Memory> memories() {
  using hooks::Int8Options;
  using hooks::PowerSGDOptions;
  using hooks::Quantization;
  using hooks::TopKOptions;
  const auto rank = [](int64_t r) { return PowerSGDOptions().matrix_approximation_rank(r); };
  Memory in_half;
  in_half.attach = [](Model& model, const Rank& self) {
    model->register_comm_hook(
        hooks::bf16_compress_wrapper(hooks::top_k(TopKOptions().ratio(0.1), self.group)));
  };
  return {
      {"PowerSGD of rank 1", of_power_sgd(rank(1))},
      {"PowerSGD of rank 4", of_power_sgd(rank(4))},
      {"PowerSGD in batches", of_power_sgd(rank(2).batch_tensors_with_same_shape(true))},
      {"PowerSGD without feedback", of_power_sgd(rank(2).use_error_feedback(false))},
      {"int8", of_hook<hooks::Int8Compress>(Int8Options().block(16))},
      {"fp8", of_hook<hooks::Fp8Compress>(hooks::Fp8Options().block(16))},
      {"int8 of tensors", of_hook<hooks::Int8Compress>(Int8Options().per(Quantization::Tensor))},
      {"TopK", of_hook<hooks::TopK>(TopKOptions().ratio(0.1))},
      {"TopK in bfloat16", in_half},
      {"no hook", Memory()},
      {"ZeRO of stage 1", of_zero(1)},
      {"ZeRO of stage 2", of_zero(2)},
  };
}

}  // namespace

TEST_CASE("a skipped step leaves all kept state unchanged", "[skipped_step][ranks]") {
  const std::vector<Overflow> overflows{
      {0}, {1}, {2, kNaN}, {2, kInfinity, /*is_everywhere=*/true}};
  for (const auto& [name, memory] : memories()) {
    const auto ends = [&, memory = memory](const Overflow* overflow, std::optional<double> scale) {
      return run_ranks<End>(
          2, [&](const Rank& self) { return train(self, memory, overflow, scale); });
    };
    const auto without = ends(nullptr, 1024);
    for (const auto& overflow : overflows) {
      CAPTURE(name, overflow.parameter, overflow.value);
      // Hooks keep scaled values: with another scale the results are only close.
      for (const auto& end : ends(&overflow, 1024)) {
        CHECK(end.steps == "+++++-++++++");
        CHECK(torch::equal(end.values, without[0].values));
      }
      for (const auto& end : ends(&overflow, std::nullopt)) {
        CHECK(end.steps == "+++++-++++++");
        CHECK(end.scale == 512);
      }
    }
  }
}

TEST_CASE("the state that a hook saves after a skipped step is finite", "[skipped_step][ranks]") {
  const auto ends = run_ranks<int64_t>(2, [](const Rank& self) {
    auto net = make_net();
    Model model(net, DistributedDataParallelOptions().process_group(self.group));
    hooks::PowerSGD hook(
        hooks::PowerSGDOptions().start_iter(2).min_compression_rate(0.5), self.group);
    model->register_comm_hook(hook);
    for (int step = 0; step < 4; ++step) {
      const auto x = torch::ones({2, 8}) * (self.rank + 1);
      (model->forward(x).sum() * (step == 3 && self.rank == 1 ? kInfinity : 1)).backward();
    }
    c10::IValue saved;
    reread(hook).read("buckets", saved);
    int64_t finite = 0;
    for (const auto& entry : saved.toGenericDict()) {
      const auto tensor = entry.value().toTensor();
      TORCH_CHECK(torch::isfinite(tensor).all().item<bool>(), entry.key().toStringRef());
      finite += tensor.abs().sum().item<double>() > 0 ? 1 : 0;
    }
    return finite;
  });
  for (const auto finite : ends) CHECK(finite == 2);  // the error, and Q
}

TEST_CASE("ranks that skip alone average in the same steps", "[skipped_step][local_sgd][ranks]") {
  const auto ends = run_ranks<End>(2, [](const Rank& self) {
    auto net = make_net();
    Model model(net, DistributedDataParallelOptions().process_group(self.group));
    model->register_comm_hook(hooks::noop());
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    PeriodicModelAverager averager(3, 0, self.group);
    GradScaler scaler(GradScalerOptions().init_scale(1024));
    End end;
    for (int step = 0; step < 7; ++step) {
      optimizer.zero_grad();
      const auto x = torch::ones({2, 8}) * (self.rank + 1);
      const auto loss = model->forward(x).square().mean();
      scaler.scale(step == kOverflow && self.rank == 1 ? loss * kInfinity : loss).backward();
      end.steps += scaler.step(optimizer) ? '+' : '-';
      scaler.update();
      averager.average_parameters(net->parameters());
    }
    end.values = flattened(net->parameters());
    end.scale = scaler.get_scale();
    return end;
  });
  CHECK(ends[0].steps == "+++++++");
  CHECK(ends[1].steps == "+++++-+");
  CHECK(ends[0].scale == 1024);
  CHECK(ends[1].scale == 512);
  CHECK(torch::isfinite(ends[0].values).all().item<bool>());
  CHECK(torch::equal(ends[0].values, ends[1].values));
}

// As in Python: the forward pass of a skipped step was valid, and so was its batch.
TEST_CASE("running statistics count a step that is skipped", "[skipped_step][ranks]") {
  struct Seen {
    std::string steps;
    std::vector<at::Tensor> buffers;
  };
  const auto batch = [](int step, int rank) {
    return torch::sin(torch::arange(20) * (0.3 + rank) + step).view({5, 4});
  };
  const auto seen = run_ranks<Seen>(2, [&](const Rank& self) {
    SyncBatchNorm norm(SyncBatchNormOptions(4).process_group(self.group));
    DistributedDataParallel model(norm, DistributedDataParallelOptions().process_group(self.group));
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    GradScaler scaler(GradScalerOptions().init_scale(1024));
    Seen mine;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const auto loss = model->forward(batch(step, self.rank)).square().sum();
      scaler.scale(step == 2 && self.rank == 1 ? loss * kInfinity : loss).backward();
      mine.steps += scaler.step(optimizer) ? '+' : '-';
      scaler.update();
    }
    for (const auto& b : norm->named_buffers()) mine.buffers.push_back(b.value());
    return mine;
  });
  torch::nn::BatchNorm1d plain(4);
  for (int step = 0; step < 4; ++step) plain(torch::cat({batch(step, 0), batch(step, 1)}));
  for (const auto& mine : seen) {
    CHECK(mine.steps == "++-+");
    REQUIRE(mine.buffers.size() == 3);
    for (size_t i = 0; i < 3; ++i) CHECK(torch::allclose(mine.buffers[i], plain->buffers()[i]));
  }
}
