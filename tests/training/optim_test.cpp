// The fused optimizers beside LibTorch's: values, state, files, errors, and what uses optimizers.
// fused_optimizers.py compares them with Python's.
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace ddp::fused_test {
namespace {

using namespace testing;

using Tensors = std::vector<at::Tensor>;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;

constexpr double kRounding = 1e-6;

at::Tensor wave(at::IntArrayRef sizes, double phase) {
  int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  return torch::sin(torch::arange(numel, torch::kDouble) * 0.7 + phase).view(sizes);
}

/// Parameters of several kinds: two dtypes, channels last, one without elements, a scalar.
Tensors make_parameters() {
  Tensors parameters{
      wave({3, 5}, 0).to(torch::kFloat),
      wave({4, 3, 2, 2}, 1).to(torch::kFloat).contiguous(at::MemoryFormat::ChannelsLast),
      wave({7}, 2), torch::zeros({0}), wave({}, 3).to(torch::kFloat)};
  for (auto& p : parameters) p.requires_grad_();
  return parameters;
}

/// Gradients of a step, contiguous; the third parameter has none in every third step.
void set_gradients(const Tensors& parameters, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& p = parameters[i];
    p.mutable_grad() = wave(p.sizes(), 0.3 * static_cast<double>(i) + step).to(p.dtype());
  }
  if (step % 3 == 0) parameters[2].mutable_grad().reset();
}

void train(torch::optim::Optimizer& optimizer, const Tensors& parameters, int from, int to) {
  for (int step = from; step < to; ++step) {
    set_gradients(parameters, step);
    optimizer.step();
  }
}

/// Two groups, the second with options of its own.
template <typename Options>
Groups in_groups(const Tensors& p, Options second) {
  second.set_lr(0.05);
  Groups groups;
  groups.emplace_back(Tensors{p[0], p[2], p[3]});
  groups.emplace_back(Tensors{p[1], p[4]}, std::make_unique<Options>(second));
  return groups;
}

/// How to make an optimizer of LibTorch and the fused one of the same options.
struct Pair {
  std::string name;
  std::function<OptimizerPtr(const Tensors&)> plain, fused;
};

template <typename Plain, typename Fused, typename Options>
Pair make_pair(const std::string& name, const Options& options) {
  return {
      name, [=](const auto& p) { return std::make_unique<Plain>(in_groups(p, options), options); },
      [=](const auto& p) { return std::make_unique<Fused>(in_groups(p, options), options); }};
}

std::vector<Pair> make_pairs() {
  using torch::optim::AdagradOptions;
  using torch::optim::AdamOptions;
  using torch::optim::AdamWOptions;
  using torch::optim::SGDOptions;
  const auto adamw = [](const auto& name, const AdamWOptions& o) {
    return make_pair<torch::optim::AdamW, optim::AdamW>(name, o);
  };
  const auto adam = [](const auto& name, const AdamOptions& o) {
    return make_pair<torch::optim::Adam, optim::Adam>(name, o);
  };
  const auto sgd = [](const auto& name, const SGDOptions& o) {
    return make_pair<torch::optim::SGD, optim::SGD>(name, o);
  };
  const auto adagrad = [](const auto& name, const AdagradOptions& o) {
    return make_pair<torch::optim::Adagrad, optim::Adagrad>(name, o);
  };
  return {
      adamw("AdamW", AdamWOptions(0.01)),
      adamw("AdamW amsgrad", AdamWOptions(0.01).weight_decay(0.1).amsgrad(true)),
      adam("Adam", AdamOptions(0.01).betas({0.8, 0.95}).eps(1e-6)),
      adam("Adam amsgrad", AdamOptions(0.01).weight_decay(0.1).amsgrad(true)),
      sgd("SGD", SGDOptions(0.1).weight_decay(0.01)),
      sgd("SGD momentum", SGDOptions(0.1).momentum(0.9).dampening(0.3)),
      sgd("SGD nesterov", SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01)),
      adagrad("Adagrad", AdagradOptions(0.1)),
      adagrad(
          "Adagrad decay",
          AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.5)),
  };
}

/// The counts of steps of all states; empty for SGD.
std::vector<int64_t> counts_of(const torch::optim::Optimizer& optimizer) {
  std::vector<int64_t> counts;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& p : group.params()) {
      const auto found = optimizer.state().find(p.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      auto* state = found->second.get();
      using namespace torch::optim;
      if (const auto* adamw = dynamic_cast<AdamWParamState*>(state))
        counts.push_back(adamw->step());
      if (const auto* adam = dynamic_cast<AdamParamState*>(state)) counts.push_back(adam->step());
      if (const auto* sum = dynamic_cast<AdagradParamState*>(state)) counts.push_back(sum->step());
    }
  }
  return counts;
}

void copy_state(const torch::optim::Optimizer& from, torch::optim::Optimizer& to) {
  std::stringstream file;
  torch::save(from, file);
  torch::load(to, file);
}

}  // namespace

TEST_CASE("fused optimizers equal LibTorch's, and read each other's files", "[optim][pure]") {
  for (const auto& pair : make_pairs()) {
    CAPTURE(pair.name);
    const auto of_plain = make_parameters(), of_fused = make_parameters();
    auto plain = pair.plain(of_plain);
    auto fused = pair.fused(of_fused);
    train(*plain, of_plain, 0, 5);
    train(*fused, of_fused, 0, 5);
    CHECK(largest_difference(of_plain, of_fused) < kRounding);
    // Each goes on with the other's file.
    auto next_plain = pair.plain(of_plain);
    auto next_fused = pair.fused(of_fused);
    copy_state(*fused, *next_plain);
    copy_state(*plain, *next_fused);
    train(*next_plain, of_plain, 5, 9);
    train(*next_fused, of_fused, 5, 9);
    CHECK(largest_difference(of_plain, of_fused) < kRounding);
    CHECK(largest_difference(of_plain, make_parameters()) > 0.01);
  }
}

TEST_CASE("a state that a program puts there counts", "[optim][pure]") {
  const auto p = torch::zeros({2}, torch::requires_grad());
  optim::Adam optimizer({p}, torch::optim::AdamOptions(0.1));
  const auto state = [&]() -> torch::optim::AdamParamState& {
    return static_cast<torch::optim::AdamParamState&>(
        *optimizer.state().at(p.unsafeGetTensorImpl()));
  };
  const auto step = [&] {
    p.mutable_grad() = torch::ones({2});
    const auto version = p._version();
    optimizer.step();
    CHECK(p._version() > version);  // the wrapper's checks look at it
  };
  step();
  step();
  CHECK(state().step() == 2);
  state().step(9);
  step();
  CHECK(state().step() == 10);
  optimizer.state().clear();
  step();
  CHECK(state().step() == 1);
  // The first step of Adam goes by the rate: the count was forgotten on the device, too.
  const auto before = p.detach().clone();
  optimizer.state().clear();
  step();
  CHECK(torch::allclose(before - p.detach(), torch::full({2}, 0.1), 1e-5));
}

TEST_CASE("a fused step runs its closure with gradients", "[optim][pure]") {
  const auto p = torch::ones({2}, torch::requires_grad());
  optim::SGD optimizer({p}, torch::optim::SGDOptions(0.5));
  const torch::NoGradGuard no_grad;
  const auto loss = optimizer.step([&] {
    auto sum = p.square().sum();
    sum.backward();
    return sum;
  });
  CHECK(loss.item<float>() == 2);
  CHECK(torch::equal(p, torch::zeros({2})));
}

TEST_CASE("fused optimizers refuse what the kernels do not take", "[optim][pure][errors]") {
  const auto error = [](const at::Tensor& p, const at::Tensor& gradient) {
    const auto first = torch::zeros({2}, torch::requires_grad());
    first.mutable_grad() = torch::ones({2});
    optim::SGD optimizer({first, p}, torch::optim::SGDOptions(1));
    p.mutable_grad() = gradient;
    const auto text = error_of<c10::ValueError>([&] { optimizer.step(); });
    CHECK(torch::equal(first, torch::zeros({2})));  // nothing was stepped
    CHECK(text.find("ddp::optim::SGD: expected ") == 0);
    CHECK(text.find("of parameter 1 in group 0") != std::string::npos);
    return text;
  };
  const auto has = [](const std::string& text, const char* part) {
    CAPTURE(text, part);
    CHECK(text.find(part) != std::string::npos);
  };
  const auto indices = torch::tensor({{0}}, torch::kLong);
  has(error(torch::zeros({2}), torch::sparse_coo_tensor(indices, torch::ones({1}), {2})),
      "got a sparse one");
  has(error(torch::zeros({2}, torch::kComplexFloat), torch::zeros({2}, torch::kComplexFloat)),
      "got ComplexFloat");
  has(error(torch::zeros({4}).slice(0, 0, 4, 2), torch::ones({2})), "no gaps, got strides [2]");

  const auto p = torch::zeros({2}, torch::requires_grad());
  optim::AdamW optimizer({p});
  p.mutable_grad() = torch::ones({2});
  optimizer.step();
  p.set_data(torch::zeros({3}));
  p.mutable_grad() = torch::ones({3});
  has(error_of<c10::ValueError>([&] { optimizer.step(); }), "expected a state of the parameter's");
}

TEST_CASE("a GradScaler lets fused optimizers skip", "[optim][pure]") {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const bool unscales = GENERATE(false, true);
  for (const auto& pair : make_pairs()) {
    CAPTURE(pair.name, unscales);
    const auto run = [&](const auto& make) {
      auto parameters = make_parameters();
      auto optimizer = make(parameters);
      GradScaler scaler(GradScalerOptions().init_scale(1024).growth_interval(3));
      std::string steps;
      for (int step = 0; step < 9; ++step) {
        set_gradients(parameters, step);
        for (auto& p : parameters) {
          if (p.grad().defined()) p.mutable_grad().mul_(scaler.get_scale());
        }
        if (step == 0 || step == 4) parameters[1].mutable_grad().view({-1})[3] = kInf;
        if (unscales) scaler.unscale_(*optimizer);
        steps += scaler.step(*optimizer) ? '+' : '-';
        scaler.update();
        if (steps.back() == '+') {
          // Gradients are unscaled, also one whose copy was stepped.
          const auto difference = parameters[1].grad() - wave({4, 3, 2, 2}, 0.3 + step);
          CHECK(difference.abs().max().template item<double>() < kRounding);
        }
      }
      CHECK(steps == "-+++-++++");
      CHECK(scaler.get_scale() == 1024);
      parameters.push_back(torch::tensor(counts_of(*optimizer)));
      return parameters;
    };
    CHECK(largest_difference(run(pair.plain), run(pair.fused)) < kRounding);
  }
}

TEST_CASE("a fused optimizer skips what a rank of another group's group found", "[optim][ranks]") {
  const bool finds = GENERATE(true, false);
  const auto ends = run_ranks<std::string>(4, [&](const Rank& self) {
    const auto mesh = init_device_mesh({2, 2}, {"dp", "tp"}, self.group);
    GradScaler scaler(
        GradScalerOptions().init_scale(8).found_inf_groups({mesh.group("dp"), mesh.group("tp")}));
    const auto p = torch::zeros({2}, torch::requires_grad());
    const auto q = torch::zeros({3}, torch::requires_grad());
    Groups groups;
    groups.emplace_back(Tensors{p});
    groups.emplace_back(Tensors{q});
    optim::AdamW optimizer(groups, torch::optim::AdamWOptions(0.5));
    const auto step = [&](float of_q) {
      p.mutable_grad() = torch::full({2}, 8.F);
      q.mutable_grad() = torch::full({3}, of_q);
      const bool steps = scaler.step(optimizer);
      scaler.update();
      return steps;
    };
    // Rank 3 is in no group with rank 0.
    const bool first = step(self.rank == 3 && finds ? std::numeric_limits<float>::infinity() : 8.F);
    const bool second = step(8.F);
    return ddp::str(first, second, torch::tensor(counts_of(optimizer)).sum().item<int64_t>());
  });
  CHECK(ends == std::vector<std::string>(4, finds ? "012" : "114"));
}

TEST_CASE("ZeRO, step_in_backward and schedules take fused optimizers", "[optim][ranks]") {
  const auto run = [](const Rank& self, const auto& optimize) {
    torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::Tanh(), torch::nn::Linear(6, 2));
    {
      const torch::NoGradGuard no_grad;
      for (auto& p : net->parameters()) p.copy_(wave(p.sizes(), 1));
    }
    DistributedDataParallel<torch::nn::Sequential> model(
        net, DistributedDataParallelOptions().process_group(self.group).bucket_cap_mb(0.0001));
    optimize(model);
    return copies_of(net->parameters());
  };
  const auto backward = [](auto& model, int step) {
    model->forward(wave({3, 4}, step).to(torch::kFloat)).square().sum().backward();
  };
  const auto options = torch::optim::AdamWOptions(0.02);
  const auto train = [&](auto& model, auto& optimizer, bool steps_itself) {
    LinearLR schedule(optimizer, LinearLROptions().start_factor(0.5).total_iters(4));
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      backward(model, step);
      if (!steps_itself) optimizer.step();
      schedule.step();
    }
  };
  const auto plain = [&](auto& model) {
    torch::optim::AdamW optimizer(model->parameters(), options);
    train(model, optimizer, false);
  };
  const auto sharded = [&](int stage) {
    return [&, stage](auto& model) {
      ZeroRedundancyOptimizer<optim::AdamW> optimizer(model, options, ZeroOptions().stage(stage));
      train(model, optimizer, false);
      TORCH_CHECK(dynamic_cast<FusedOptimizer*>(optimizer.consolidated().get()));
    };
  };
  const auto in_backward = [&](auto& model) {
    auto optimizer = std::make_shared<optim::AdamW>(model->parameters(), options);
    model->step_in_backward(optimizer);
    train(model, *optimizer, true);
    model->check_replicas();
  };
  const auto results = run_ranks<std::vector<Tensors>>(2, [&](const Rank& self) {
    return std::vector<Tensors>{
        run(self, plain), run(self, sharded(1)), run(self, sharded(2)), run(self, in_backward)};
  });
  for (const auto& of_rank : results) {
    for (size_t i = 1; i < of_rank.size(); ++i) {
      CAPTURE(i);
      CHECK(largest_difference(of_rank[0], of_rank[i]) < kRounding);
    }
  }
}

TEST_CASE("a checkpoint of a fused optimizer loads into LibTorch's, and back", "[optim][pure]") {
  const auto run_ends = run_ranks<double>(1, [](const Rank& self) {
    const TemporaryFolder folder;
    const auto options = torch::optim::AdamWOptions(0.01);
    const auto checkpointer_of = [&](torch::optim::Optimizer& optimizer) {
      auto checkpointer = std::make_unique<Checkpointer>(
          folder.path(), CheckpointerOptions().process_group(self.group));
      checkpointer->add("optimizer", optimizer);
      return checkpointer;
    };
    auto parameters = make_parameters();
    optim::AdamW fused(parameters, options);
    train(fused, parameters, 0, 4);
    checkpointer_of(fused)->save(4);
    torch::optim::AdamW plain(parameters, options);
    TORCH_CHECK(checkpointer_of(plain)->load_latest() == 4);
    auto of_fused = make_parameters();
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) of_fused[i].copy_(parameters[i]);
    optim::AdamW resumed(of_fused, options);
    train(resumed, of_fused, 0, 2);  // counts that loading replaces
    for (size_t i = 0; i < parameters.size(); ++i) of_fused[i].copy_(parameters[i]);
    TORCH_CHECK(checkpointer_of(resumed)->load_latest() == 4);
    train(plain, parameters, 4, 7);
    train(resumed, of_fused, 4, 7);
    return largest_difference(parameters, of_fused);
  });
  CHECK(run_ends[0] < kRounding);
}

}  // namespace ddp::fused_test
