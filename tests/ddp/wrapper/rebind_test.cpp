// Ranks are lost and join: the others keep their wrapper, and go on with another group.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/replicas.h>
#include <ddp/sampler.h>
#include <ddp/zero.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "ddp/wrapping.h"
#include "sampler/drawing.h"
#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/regroup.h"

#include "support/catch.h"

namespace ddp {
namespace rebind_test {

/// Cannot be made while `breaks`.
class BreakingSGD : public torch::optim::SGD {
 public:
  inline static thread_local bool breaks = false;

  BreakingSGD(
      const std::vector<torch::optim::OptimizerParamGroup>& groups,
      const torch::optim::SGDOptions& defaults)
      : SGD(groups, defaults) {
    TORCH_CHECK(!breaks, "the optimizer broke");
  }
};

}  // namespace rebind_test

template <>
struct detail::ZeroTypes<rebind_test::BreakingSGD> : detail::ZeroTypes<torch::optim::SGD> {};

namespace {

using rebind_test::BreakingSGD;
using namespace testing;

constexpr size_t kSamples = 50;
constexpr size_t kStep = 8;  // samples that all ranks together take: 3 ranks get 3, 3 and 2
constexpr int kSteps = 9;    // one epoch of 7 steps, the last of 2 samples, and two more

/// Uses its layers in another order than it has them, and sums of floats depend on the buckets.
class CrossedImpl : public torch::nn::Module {
 public:
  CrossedImpl() {
    last = register_module("last", torch::nn::Linear(16, 3));
    middle = register_module("middle", torch::nn::Linear(16, 16));
    first = register_module("first", torch::nn::Linear(5, 16));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
    set_waves(*this, {1.7, 0.3, 0, 0.3});
  }
  at::Tensor forward(const at::Tensor& x) {
    return last->forward(norm->forward(middle->forward(first->forward(x).tanh())).tanh());
  }
  torch::nn::Linear last{nullptr}, middle{nullptr}, first{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Crossed);

/// A rank that is lost.
struct Lost {};

/// One rank's training.
class Training {
 public:
  explicit Training(const ProcessGroup& group, bool as_views = false)
      : model(
            net, DistributedDataParallelOptions()
                     .process_group(group)
                     .bucket_cap_mb(3e-4)
                     .gradient_as_bucket_view(as_views)
                     .find_unused_parameters(false)
                     .reduction(Reduction::SampleWeighted)
                     .init_sync(true)),
        optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
        sampler(
            kSamples, DistributedSamplerOptions()
                          .num_replicas(group->getSize())
                          .rank(group->getRank())
                          .advance_epoch(true)) {
    for (auto& p : net->parameters()) {  // so that it can be sent
      auto state = std::make_unique<torch::optim::SGDParamState>();
      state->momentum_buffer(torch::zeros_like(p));
      optimizer.state()[p.unsafeGetTensorImpl()] = std::move(state);
    }
  }

  /// Trains a step; where `is_lost`, ends in the midst of it.
  void step(bool is_lost = false) {
    boundary = saved(sampler);
    auto indices = sampler.next_of(kStep);
    if (!indices) {
      sampler.reset();
      indices = sampler.next_of(kStep);
    }
    std::vector<float> numbers(indices->begin(), indices->end());
    const auto x = torch::sin(torch::tensor(numbers).view({-1, 1}) * torch::arange(1.0F, 6.0F));
    optimizer.zero_grad();
    const auto y = model->forward(x);
    if (is_lost) throw Lost();
    (x.size(0) > 0 ? (y - x.narrow(1, 0, 3)).square().mean() : y.sum()).backward();
    optimizer.step();
    samples.push_back(*indices);
  }

  void undo() { load(sampler, boundary); }

  std::vector<at::Tensor> state() {
    std::vector<at::Tensor> all = net->parameters();
    for (auto& b : net->buffers()) all.push_back(b);
    for (auto& p : net->parameters()) {
      auto& own = *optimizer.state().at(p.unsafeGetTensorImpl());
      all.push_back(static_cast<torch::optim::SGDParamState&>(own).momentum_buffer());
    }
    return all;
  }

  /// Gives all ranks of `group` rank 0's state.
  void share_state(const ProcessGroup& group) {
    const torch::NoGradGuard no_grad;
    for (auto& tensor : state()) {
      auto value = tensor.detach().clone();
      broadcast(value, 0, group);
      tensor.copy_(value);
    }
    const auto positions = all_gather_strings(saved(sampler), group);
    load(sampler, positions.front());
  }

  void rebind(const ProcessGroup& group) {
    model->rebind(group);
    sampler.rebind(group);
  }

  Crossed net;
  DistributedDataParallel<Crossed> model;
  torch::optim::SGD optimizer;
  DistributedSampler sampler;
  std::vector<Indices> samples;  // of this rank, by step
  std::string boundary;
};

struct Trained {
  std::vector<at::Tensor> state;
  std::vector<Indices> samples;
  std::vector<std::vector<size_t>> buckets;
};

Trained result_of(Training& training) {
  Trained trained{{}, training.samples, training.model->stats().buckets};
  for (const auto& tensor : training.state()) trained.state.push_back(tensor.detach().clone());
  return trained;
}

std::vector<Trained> quiet_run(int size) {
  return run_ranks<Trained>(size, [](const Rank& self) {
    Training training(self.group);
    for (int step = 0; step < kSteps; ++step) training.step();
    return result_of(training);
  });
}

/// Trains until rank 2 is lost in step `lost_at`; returns whether this rank is that one.
bool train_until_loss(const Rank& self, std::optional<Training>& training, int lost_at) {
  for (int step = 0; step < lost_at; ++step) training->step();
  const bool is_lost = self.rank == 2;
  try {
    training->step(is_lost);
    throw std::runtime_error("expected the step to fail");
  } catch (const Lost&) {
    // What a process leaves: nothing of the rank is left.
    training.reset();
    monitor_of(self.group)->fail("rank 2 was lost");
  } catch (const c10::Error&) {
    training->undo();
  }
  return is_lost;
}

/// The samples of all ranks in the first epoch's steps, sorted.
Indices first_epoch(const std::vector<Trained>& ranks, int from = 0) {
  Indices all;
  const size_t steps = (kSamples + kStep - 1) / kStep;
  for (const auto& rank : ranks) {
    for (size_t step = from; step < steps; ++step) {
      all.insert(all.end(), rank.samples[step].begin(), rank.samples[step].end());
    }
  }
  std::sort(all.begin(), all.end());
  return all;
}

}  // namespace

TEST_CASE("a rank that takes a lost one's place: the bits of a quiet run", "[ranks][ddp][rebind]") {
  // Before the ranks have agreed on the order of the buckets, before they are rebuilt, and after.
  const int lost_at = GENERATE(0, 1, 4);
  CAPTURE(lost_at);
  const auto quiet = quiet_run(3);
  const auto mended = run_ranks<Trained>(3, [&](const Rank& self) {
    std::optional<Training> training(self.group);
    if (train_until_loss(self, training, lost_at)) {
      training.emplace(regroup(self, "alone", 0, 1));
      training->samples.resize(lost_at);
    }
    const auto group = regroup(self, "mended", self.rank, 3);
    training->share_state(group);
    training->rebind(group);
    for (int step = lost_at; step < kSteps; ++step) training->step();
    return result_of(*training);
  });
  for (int rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    CHECK(all_equal(mended[rank].state, quiet[rank].state));
    CHECK(mended[rank].buckets == quiet[rank].buckets);
    CHECK(mended[rank].buckets.size() > 2);
    for (int step = lost_at; step < kSteps; ++step) {
      CHECK(mended[rank].samples[step] == quiet[rank].samples[step]);
    }
  }
}

TEST_CASE("two ranks go on after the third is lost", "[ranks][ddp][rebind]") {
  const int lost_at = GENERATE(1, 4);
  CAPTURE(lost_at);
  // Two ranks that begin anew with the state of three.
  const auto anew = run_ranks<Trained>(3, [&](const Rank& self) {
    std::optional<Training> training(self.group);
    for (int step = 0; step < lost_at; ++step) training->step();
    if (self.rank == 2) return Trained();
    const auto group = regroup(self, "two", self.rank, 2);
    Training two(group);
    const auto state = training->state();
    const torch::NoGradGuard no_grad;
    auto own = two.state();
    for (size_t i = 0; i < own.size(); ++i) own[i].copy_(state[i]);
    load(two.sampler, saved(training->sampler));
    two.samples = training->samples;
    const torch::AutoGradMode with_grad(true);
    for (int step = lost_at; step < kSteps; ++step) two.step();
    return result_of(two);
  });
  auto gone_on = run_ranks<Trained>(3, [&](const Rank& self) {
    std::optional<Training> training(self.group);
    if (train_until_loss(self, training, lost_at)) return Trained();
    training->rebind(regroup(self, "two", self.rank, 2));
    for (int step = lost_at; step < kSteps; ++step) training->step();
    return result_of(*training);
  });
  gone_on.pop_back();
  for (int rank = 0; rank < 2; ++rank) {
    CAPTURE(rank);
    CHECK(all_equal(gone_on[rank].state, anew[rank].state));
    CHECK(gone_on[rank].samples == anew[rank].samples);
  }
  // After the loss, and before, with what the lost rank had in them.
  const auto quiet = quiet_run(3);
  CHECK(first_epoch(gone_on, lost_at) == first_epoch(quiet, lost_at));
  Indices whole(kSamples);
  for (size_t i = 0; i < kSamples; ++i) whole[i] = i;
  CHECK(first_epoch(quiet) == whole);
}

TEST_CASE("rebind keeps the rest of a wrapper", "[ranks][ddp][rebind]") {
  const std::string kind = GENERATE("hook", "optimizer", "bf16", "views", "tensor of no module");
  CAPTURE(kind);
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [&](const Rank& self) {
    const auto after = [&](bool rebinds) {
      Crossed net;
      auto options = in(self).bucket_cap_mb(3e-4).gradient_as_bucket_view(kind == "views");
      if (kind == "bf16") options.mixed_precision(MixedPrecision().param_dtype(at::kBFloat16));
      DistributedDataParallel model(net, options);
      const auto scale = torch::ones({1}, torch::requires_grad());
      if (kind == "tensor of no module") model->also_average({scale});
      const auto optimizer = std::make_shared<torch::optim::SGD>(net->parameters(), 0.1);
      if (kind == "hook") model->register_comm_hook(hooks::bf16_compress(self.group));
      if (kind == "optimizer") model->step_in_backward(optimizer);
      const auto step = [&](int number) {
        model->zero_grad();
        const auto x = torch::sin(torch::arange(10.0F).view({2, 5}) + number + self.rank);
        (model->forward(x).square().sum() * scale).sum().backward();
        if (kind != "optimizer") optimizer->step();
      };
      for (int i = 0; i < 3; ++i) step(i);
      if (rebinds) {
        const auto group = regroup(self, "again", self.rank, self.size);
        model->rebind(group, kind == "hook" ? hooks::bf16_compress(group) : CommHook());
        TORCH_CHECK(model->join_process_group() == group);
      }
      for (int i = 3; i < 6; ++i) step(i);
      auto values = net->parameters();
      values.push_back(scale.grad());
      return torch::cat([&] {
        std::vector<at::Tensor> flat;
        for (const auto& value : values) flat.push_back(value.detach().flatten());
        return flat;
      }());
    };
    return std::vector<at::Tensor>{after(false), after(true)};
  });
  for (const auto& result : results) CHECK(torch::equal(result[0], result[1]));
}

TEST_CASE("what rebind refuses, it refuses on every rank", "[ranks][ddp][rebind][errors]") {
  const std::string kind = GENERATE("zero", "model", "join");
  CAPTURE(kind);
  const auto errors = run_ranks<std::vector<std::string>>(2, [&](const Rank& self) {
    Crossed net;
    DistributedDataParallel model(net, in(self));
    const auto step = [&] { model->forward(torch::ones({2, 5})).sum().backward(); };
    step();
    std::optional<ZeroRedundancyOptimizer<torch::optim::Adam>> optimizer;
    if (kind == "zero") {
      optimizer.emplace(model, torch::optim::AdamOptions(), ZeroOptions().overlap(true));
    }
    if (kind == "model" && self.rank == 1) net->last->weight.set_requires_grad(false);
    const auto group = regroup(self, "again", self.rank, self.size);
    std::string error;
    const auto rebind = [&] { error = error_of([&] { model->rebind(group); }); };
    kind == "join" ? model->join(rebind) : rebind();
    optimizer.reset();
    net->last->weight.set_requires_grad(true);
    // The wrapper is still in its old group.
    step();
    return std::vector<std::string>{error, model->join_process_group() == self.group ? "" : "new"};
  });
  const std::string text = kind == "zero"    ? "expected no ZeroRedundancyOptimizer of this model"
                           : kind == "model" ? "parameter \"last.weight\" is"
                                             : "expected to be called between two steps";
  CHECK_THAT(errors[0][0], ContainsText(text));
  if (kind != "join") CHECK(errors[0][0] == errors[1][0]);
  for (const auto& error : errors) CHECK(error[1] == "");
}

TEST_CASE("a sharded optimizer follows its model, and drops its state", "[ranks][ddp][rebind]") {
  const int use = GENERATE(0, 1, 2);
  const int stage = use == 0 ? 1 : 2;
  const bool names_group = use == 2;  // the model's: stage 2 takes no other
  CAPTURE(stage, names_group);
  const auto results = run_ranks<std::vector<std::string>>(2, [&](const Rank& self) {
    auto options = ZeroOptions().stage(stage);
    if (names_group) options.process_group(self.group);
    Crossed net;
    DistributedDataParallel model(net, in(self));
    ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(
        model, torch::optim::AdamOptions(), options);
    ZeroRedundancyOptimizer<torch::optim::SGD> other(
        model, torch::optim::SGDOptions(0.1), ZeroOptions().process_group(self.group));
    const auto backward = [&] { model->forward(torch::ones({2, 5})).sum().backward(); };
    const auto step = [&] {
      backward();
      optimizer.step();
    };
    step();
    backward();
    const bool had_state = optimizer.local_state_bytes() > 0 && !optimizer.gradients().empty();
    const auto group = regroup(self, "again", self.rank, self.size);
    std::vector<std::string> errors{error_of([&] { optimizer.rebind(group); })};
    model->rebind(group);
    errors.push_back(error_of([&] { optimizer.step(); }));
    const bool keeps_state = optimizer.local_state_bytes() > 0;
    optimizer.rebind(group);
    other.rebind(group);
    const bool is_bare = optimizer.local_state_bytes() == 0 && optimizer.gradients().empty();
    step();
    other.step();
    const bool follows = optimizer.process_group() == group && other.process_group() == group;
    errors.emplace_back(had_state && keeps_state && is_bare && follows ? "" : "state or group");
    return errors;
  });
  for (const auto& errors : results) {
    CHECK_THAT(
        errors[0], ContainsText("expected the model's group in rebind(), got another one on rank"));
    CHECK_THAT(errors[1], ContainsText("got one after refresh() or rebind() on rank"));
    CHECK(errors[2] == "");
  }
}

TEST_CASE(
    "a sharded optimizer whose rebind fails is as before, and rebinds again",
    "[ranks][ddp][rebind][errors]") {
  const int stage = GENERATE(1, 2);
  CAPTURE(stage);
  const auto results = run_ranks<std::vector<std::string>>(2, [&](const Rank& self) {
    Crossed net;
    DistributedDataParallel model(net, in(self));
    ZeroRedundancyOptimizer<BreakingSGD> optimizer(
        model, torch::optim::SGDOptions(0.1).momentum(0.9), ZeroOptions().stage(stage));
    const auto backward = [&] { model->forward(torch::ones({2, 5})).sum().backward(); };
    const auto step = [&] {
      backward();
      optimizer.step();
    };
    step();
    backward();
    const auto values = torch::nn::utils::parameters_to_vector(net->parameters()).clone();
    const auto group = regroup(self, "again", self.rank, self.size);
    model->rebind(group);
    const auto parts = optimizer.gradients();
    BreakingSGD::breaks = true;
    std::vector<std::string> errors{error_of([&] { optimizer.rebind(group); })};
    BreakingSGD::breaks = false;
    const auto parts_now = optimizer.gradients();
    bool is_as_before = optimizer.process_group() == self.group &&
                        optimizer.local_state_bytes() > 0 && parts.size() == parts_now.size();
    for (size_t i = 0; is_as_before && i < parts.size(); ++i) {
      is_as_before = torch::equal(parts[i], parts_now[i]);
    }
    is_as_before = is_as_before &&
                   torch::equal(values, torch::nn::utils::parameters_to_vector(net->parameters()));
    errors.push_back(error_of([&] { optimizer.step(); }));
    errors.push_back(error_of([&] {
      optimizer.rebind(group);
      step();
    }));
    const auto now = torch::nn::utils::parameters_to_vector(net->parameters());
    const bool follows = optimizer.process_group() == group && !torch::equal(now, values) &&
                         replicas_equal(*net, group);
    errors.emplace_back(is_as_before ? "" : "changed");
    errors.emplace_back(follows ? "" : "does not follow");
    return errors;
  });
  for (const auto& errors : results) {
    CHECK_THAT(errors[0], ContainsText("the optimizer broke"));
    CHECK_THAT(errors[1], ContainsText("got one after refresh() or rebind() on rank"));
    CHECK(errors[2] == "");
    CHECK(errors[3] == "");
    CHECK(errors[4] == "");
  }
}

TEST_CASE("hooks without a group follow the default group", "[ddp][rebind]") {
  const auto init = [](int world) {
    return init_process_group(ProcessGroupOptions().backend("gloo").rank(0).world_size(world).store(
        c10::make_intrusive<c10d::HashStore>()));
  };
  init(1);
  const auto hook = hooks::fp16_compress();
  Crossed net;
  DistributedDataParallel model(net);
  model->register_comm_hook(hook);
  const auto step = [&] { model->forward(torch::ones({2, 5})).sum().backward(); };
  step();
  destroy_process_group();
  const auto second = init(1);
  model->rebind();
  CHECK(model->join_process_group() == second);
  step();
  destroy_process_group();
  CHECK_THAT(error_of([&] { step(); }), ContainsText("default"));
}

}  // namespace ddp
