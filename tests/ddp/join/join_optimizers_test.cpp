// The state of optimizers after joins in which ranks had different numbers of batches.
#include <ATen/CPUGeneratorImpl.h>
#include <ddp/ddp.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/warnings.h"

#include "support/catch.h"

// A namespace of its own, since a unity build joins the tests' files, and others use these names.
namespace ddp::join_optimizers {
namespace {

using namespace testing;

constexpr int kBatches[] = {3, 5, 4};  // by rank, in each epoch
constexpr int kEpochs = 3;

torch::nn::Sequential make_net() {
  torch::nn::Sequential net(
      torch::nn::Linear(4, 8), torch::nn::ReLU(), torch::nn::BatchNorm1d(8),
      torch::nn::Linear(8, 2));
  draw_normal(*net, 0.3);
  return net;
}

/// An optimizer that keeps a copy of the parameters after each of its steps.
template <typename Optimizer>
class Recorded : public Optimizer {
 public:
  using Optimizer::Optimizer;

  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    auto loss = Optimizer::step(closure);
    steps.push_back(flattened(this->param_groups()[0].params()));
    return loss;
  }

  std::vector<at::Tensor> steps;
};

std::vector<at::Tensor> tensors_of(const torch::optim::OptimizerParamState& state) {
  using namespace torch::optim;
  if (const auto* adam = dynamic_cast<const AdamParamState*>(&state)) {
    return {adam->exp_avg(), adam->exp_avg_sq(), torch::full({1}, adam->step())};
  }
  if (const auto* adamw = dynamic_cast<const AdamWParamState*>(&state)) {
    return {
        adamw->exp_avg(), adamw->exp_avg_sq(), adamw->max_exp_avg_sq(),
        torch::full({1}, adamw->step())};
  }
  return {dynamic_cast<const SGDParamState&>(state).momentum_buffer()};
}

/// Parameters, buffers, the optimizer's state of each parameter, and its learning rate.
std::vector<at::Tensor> tensors_of(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& p : net->parameters()) {
    all.push_back(p.detach().clone());
    for (const auto& t : tensors_of(*optimizer.state().at(p.unsafeGetTensorImpl()))) {
      all.push_back(t.clone());
    }
  }
  for (const auto& b : net->buffers()) all.push_back(b.clone());
  all.push_back(torch::full({1}, optimizer.param_groups()[0].options().get_lr()));
  return all;
}

enum class Remedy { None, Option, StepInBackward };

struct Seen {
  std::vector<std::vector<at::Tensor>> after_epochs;
  std::vector<at::Tensor> after_steps;
  int warnings = 0;
};

template <typename Optimizer, typename Options>
Seen train(const Rank& self, const Options& optimizer_options, Remedy remedy) {
  Warnings warnings;
  auto net = make_net();
  DistributedDataParallel model(net, in(self));
  auto optimizer = std::make_shared<Recorded<Optimizer>>(net->parameters(), optimizer_options);
  if (remedy == Remedy::StepInBackward) model->step_in_backward(optimizer);
  JoinOptions options;
  if (remedy == Remedy::Option) options.optimizers({optimizer.get()});
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + self.rank);
  Seen seen;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    model->join(
        [&] {
          for (int i = 0; i < kBatches[self.rank]; ++i) {
            optimizer->zero_grad();
            model->forward(torch::randn({6, 4}, generator)).square().sum().backward();
            if (remedy != Remedy::StepInBackward) optimizer->step();
          }
        },
        options);
    seen.after_epochs.push_back(tensors_of(net, *optimizer));
  }
  seen.after_steps = optimizer->steps;
  seen.warnings = warnings.count("optimizers took fewer steps");
  return seen;
}

std::vector<Seen> train(const std::string& kind, Remedy remedy) {
  using namespace torch::optim;
  return run_ranks<Seen>(3, [&](const Rank& self) {
    if (kind == "adam") return train<Adam>(self, AdamOptions(0.01), remedy);
    if (kind == "adamw") return train<AdamW>(self, AdamWOptions(0.01).amsgrad(true), remedy);
    return train<SGD>(self, SGDOptions(0.01).momentum(0.9), remedy);
  });
}

}  // namespace

TEST_CASE("optimizers in JoinOptions are equal after each uneven join", "[ranks][join][many]") {
  const std::string kind = GENERATE("adam", "adamw", "sgd");
  CAPTURE(kind);
  const WarnAlways always;
  const auto seen = train(kind, Remedy::Option);
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    CHECK(all_equal(seen[0].after_epochs[epoch], seen[1].after_epochs[epoch]));
    CHECK(all_equal(seen[0].after_epochs[epoch], seen[2].after_epochs[epoch]));
  }
  for (const auto& of_rank : seen) CHECK(of_rank.warnings == 0);
}

TEST_CASE("a rank without input steps in backward, equal at every step", "[ranks][join][many]") {
  const std::string kind = GENERATE("adam", "adamw", "sgd");
  CAPTURE(kind);
  const WarnAlways always;
  const auto seen = train(kind, Remedy::StepInBackward);
  CHECK(seen[0].after_steps.size() == 5 * kEpochs);
  for (int rank = 1; rank < 3; ++rank) {
    CHECK(all_equal(seen[0].after_steps, seen[rank].after_steps));
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      CHECK(all_equal(seen[0].after_epochs[epoch], seen[rank].after_epochs[epoch]));
    }
  }
  for (const auto& of_rank : seen) CHECK(of_rank.warnings == 0);
}

TEST_CASE("a rank without input steps no parameter that the others did not use", "[ranks][join]") {
  struct Two : torch::nn::Module {
    Two() {
      a = register_parameter("a", torch::ones({1}));
      b = register_parameter("b", torch::ones({1}));
    }
    at::Tensor forward(bool with_b) { return with_b ? a + b : a * 1; }
    at::Tensor a, b;
  };
  const auto momenta = run_ranks<std::vector<at::Tensor>>(2, [](const Rank& self) {
    auto net = std::make_shared<Two>();
    DistributedDataParallel model(net, in(self).find_unused_parameters(true));
    auto optimizer = std::make_shared<torch::optim::SGD>(
        net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    model->step_in_backward(optimizer);
    model->join([&] {
      for (int i = 0; i < 1 + 2 * self.rank; ++i) {
        optimizer->zero_grad();
        model->forward(/*with_b=*/i == 0).sum().backward();
      }
    });
    std::vector<at::Tensor> seen;
    for (const auto& p : net->parameters()) {
      seen.push_back(tensors_of(*optimizer->state().at(p.unsafeGetTensorImpl()))[0].clone());
    }
    return seen;
  });
  CHECK(all_equal(momenta[0], momenta[1]));
}

TEST_CASE("an uneven join warns of optimizers that it leaves different", "[ranks][join][many]") {
  const WarnAlways always;
  const auto seen = train("adam", Remedy::None);
  CHECK(!all_equal(seen[0].after_epochs[0], seen[1].after_epochs[0]));
  for (const auto& of_rank : seen) CHECK(of_rank.warnings == kEpochs);
}

TEST_CASE("optimizers get the learning rate of the last rank", "[ranks][join]") {
  const auto rates = run_ranks<double>(2, [](const Rank& self) {
    auto net = make_net();
    DistributedDataParallel model(net, in(self));
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(1).momentum(0.9));
    torch::optim::StepLR schedule(optimizer, /*step_size=*/1, /*gamma=*/0.5);
    model->join(
        [&] {
          for (int i = 0; i < 1 + self.rank; ++i) {
            optimizer.zero_grad();
            model->forward(torch::ones({2, 4})).sum().backward();
            optimizer.step();
            schedule.step();
          }
        },
        JoinOptions().optimizers({&optimizer}));
    return optimizer.param_groups()[0].options().get_lr();
  });
  CHECK(rates == std::vector<double>{0.5, 0.5});  // a scheduler's first step() changes nothing
}

TEST_CASE("a sharded optimizer is an object of the join", "[ranks][join][errors]") {
  const bool is_joined = GENERATE(true, false);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    auto net = make_net();
    DistributedDataParallel model(net, in(self));
    ZeroRedundancyOptimizer<torch::optim::Adam> zero(model, torch::optim::AdamOptions(0.01));
    std::vector<Joinable*> objects{model.get()};
    if (is_joined) objects.push_back(&zero);
    join(
        objects,
        [&] {
          for (int i = 0; i < 1 + self.rank; ++i) {
            zero.zero_grad();
            model->forward(torch::ones({2, 4})).sum().backward();
            if (is_joined) zero.step();
          }
        },
        JoinOptions().optimizers({&zero}));
  });
  CHECK_THAT(
      errors, Each(
                  ContainsText("whole state each rank has, got a ZeroRedundancyOptimizer") &&
                  ContainsText("ddp::join({model.get(), &optimizer}, body)")));
}

}  // namespace ddp::join_optimizers
