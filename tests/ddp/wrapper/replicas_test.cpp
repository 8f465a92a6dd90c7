// check_replicas() and its kin: which differences between ranks are found, and which are allowed.
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <ddp/replicas.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

// Two layers with a BatchNorm between them.
struct LayeredImpl : torch::nn::Module {
  LayeredImpl() {
    const torch::NoGradGuard no_grad;
    for (auto& p : parameters()) p.copy_(torch::linspace(-0.5, 1, p.numel()).view_as(p));
  }
  at::Tensor forward(const at::Tensor& x) { return last(norm(first(x))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(3, 4));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(4));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(4, 2));
};
TORCH_MODULE(Layered);

using LayeredModel = DistributedDataParallel<Layered>;

at::Tensor rows_of(int rank, int step) {
  return torch::linspace(-1, 1 + rank, 15).view({5, 3}).roll(step);
}

void reduced_backward(LayeredModel& model, int rank, int step) {
  model->zero_grad();
  model->forward(rows_of(rank, step)).square().sum().backward();
}

void train_steps(LayeredModel& model, torch::optim::Optimizer& optimizer, int rank, int steps) {
  for (int step = 0; step < steps; ++step) {
    reduced_backward(model, rank, step);
    optimizer.step();
  }
}

// The text that all three ranks throw after two steps and a call of `spoil` on rank 1.
std::string text_after(
    const std::function<void(Layered&, torch::optim::Adam&)>& spoil, bool with_optimizer = false) {
  return error_of_all(3, [&](const Rank& self) {
    Layered net;
    LayeredModel model(net, in(self));
    torch::optim::Adam optimizer(model->parameters(), 0.01);
    train_steps(model, optimizer, self.rank, 2);
    with_optimizer ? model->check_replicas({&optimizer}) : model->check_replicas();
    const torch::NoGradGuard no_grad;
    if (self.rank == 1) spoil(net, optimizer);
    const auto error = error_of(
        [&] { with_optimizer ? model->check_replicas({&optimizer}) : model->check_replicas(); });
    // The group stays usable, and refresh() gives all ranks rank 0's values.
    model->refresh();
    model->check_replicas();
    if (!error.empty()) throw std::runtime_error(error);
  });
}

}  // namespace

TEST_CASE(
    "the error names a parameter that differs, on which rank and by how much", "[ranks][ddp]") {
  CHECK_THAT(
      text_after([](Layered& net, auto&) {
        net->first->weight[1][2] += 0.25;
        net->first->weight[0][0] -= 0.125;
        net->last->bias[0] += 1;
      }),
      ContainsText(
          "check_replicas: expected the same values on every rank, but parameter \"first.weight\" "
          "(the first of 2) differs on rank 1 from rank 0's by up to 0.25 in 2 of 12 elements.") &&
          ContainsText("model->refresh()"));
  CHECK_THAT(
      text_after([](Layered& net, auto&) { net->first->bias[3] = std::nan(""); }),
      ContainsText("\"first.bias\" differs on rank 1 from rank 0's by up to nan in 1 of 4"));
  CHECK_THAT(
      text_after([](Layered& net, auto&) { net->norm->running_var[0] += 2; }),
      ContainsText("but buffer \"norm.running_var\" differs on rank 1 from rank 0's by up to 2 in "
                   "1 of 4 elements"));
}

TEST_CASE("the error names a learning rate or optimizer state that differs", "[ranks][ddp]") {
  const auto slower = [](Layered&, torch::optim::Adam& optimizer) {
    optimizer.param_groups()[0].options().set_lr(0.001);
  };
  CHECK(text_after(slower).empty());
  CHECK_THAT(
      text_after(slower, true), ContainsText("but optimizer value \"lr of parameter group 0\" is "
                                             "0.01 on rank 0 and 0.001 on rank 1."));
  CHECK_THAT(
      text_after(
          [](Layered& net, torch::optim::Adam& optimizer) {
            auto& state = optimizer.state()[net->first->weight.unsafeGetTensorImpl()];
            static_cast<torch::optim::AdamParamState&>(*state).exp_avg()[0][0] += 3;
          },
          true),
      ContainsText("but optimizer value \"exp_avg of first.weight\" differs on rank 1 from rank "
                   "0's by up to 3 in 1 of 12 elements"));
  // A state that one rank lost, as after a load on the others only.
  CHECK_THAT(
      text_after([](Layered&, torch::optim::Adam& optimizer) { optimizer.state().clear(); }, true),
      ContainsText("optimizer value \"step of first.weight\" (number) is not on rank 1"));
}

TEST_CASE("different shapes or names on a rank are an error, not a hang", "[ranks][ddp]") {
  const auto text_of = [](const std::function<void(Layered&)>& spoil) {
    return error_of_all(3, [&](const Rank& self) {
      Layered net;
      LayeredModel model(net, in(self));
      if (self.rank == 1) spoil(net);
      model->check_replicas();
    });
  };
  CHECK_THAT(
      text_of([](Layered& net) { net->register_parameter("extra", torch::ones({2})); }),
      ContainsText("parameter \"extra\" ([2] Float) is only on rank 1"));
  CHECK_THAT(
      text_of([](Layered& net) { net->first->bias.set_data(torch::zeros({5})); }),
      ContainsText("parameter \"first.bias\" is [4] Float on rank 0 and [5] Float on rank 1"));
}

TEST_CASE("the smallest difference is found", "[ranks][ddp]") {
  CHECK_THAT(
      text_after([](Layered& net, auto&) {
        net->first->bias[0] = 0;
        net->first->bias[0] = std::numeric_limits<float>::denorm_min();
      }),
      ContainsText("\"first.bias\" differs on rank 1"));
}

TEST_CASE("check_replicas reads the state of every optimizer", "[ranks][ddp]") {
  const std::string kind = GENERATE("lbfgs", "rmsprop", "adagrad", "adamw", "own");
  CAPTURE(kind);
  // A program's own optimizer, whose options and state cannot be serialized.
  struct OwnOptions : torch::optim::OptimizerCloneableOptions<OwnOptions> {
    double get_lr() const override { return lr; }
    void set_lr(const double value) override { lr = value; }
    double lr = 0.5;
  };
  struct Own : torch::optim::Optimizer {
    explicit Own(std::vector<at::Tensor> p)
        : torch::optim::Optimizer(
              {torch::optim::OptimizerParamGroup(std::move(p))}, std::make_unique<OwnOptions>()) {}
    at::Tensor step(LossClosure closure) override { return closure ? closure() : at::Tensor(); }
    void save(torch::serialize::OutputArchive& /*archive*/) const override {}
    void load(torch::serialize::InputArchive& /*archive*/) override {}
  };
  const auto error = error_of_all(2, [&](const Rank& self) {
    Layered net;
    LayeredModel model(net, in(self));
    const auto parameters = model->parameters();
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (kind == "lbfgs") optimizer = std::make_unique<torch::optim::LBFGS>(parameters, 0.01);
    if (kind == "rmsprop") optimizer = std::make_unique<torch::optim::RMSprop>(parameters, 0.01);
    if (kind == "adagrad") optimizer = std::make_unique<torch::optim::Adagrad>(parameters, 0.01);
    if (kind == "adamw") optimizer = std::make_unique<torch::optim::AdamW>(parameters, 0.01);
    if (kind == "own") optimizer = std::make_unique<Own>(parameters);
    // All ranks use rank 0's rows, so that their BatchNorm statistics and losses are the same.
    for (int step = 0; step < 2; ++step) {
      optimizer->step([&] {
        reduced_backward(model, /*rank=*/0, step);
        return torch::ones({});
      });
      model->check_replicas({optimizer.get()});
    }
    if (self.rank == 1) optimizer->param_groups()[0].options().set_lr(0.25);
    model->check_replicas({optimizer.get()});
  });
  CHECK_THAT(
      error, ContainsText("but optimizer value \"lr of parameter group 0\" is 0.") &&
                 ContainsText(" on rank 0 and 0.25 on rank 1."));
}

TEST_CASE("ranks that compare different things throw", "[ranks][ddp][errors]") {
  const auto error = error_of_all(2, [&](const Rank& self) {
    Layered net;
    LayeredModel model(net, in(self));
    self.rank == 0 ? model->check_replicas() : model->refresh();
  });
  CHECK_THAT(
      error, ContainsText("rank 0 compares the ranks' replicas and rank 1 the ranks' models"));
}

TEST_CASE("all ranks throw the error of a rank that cannot be compared", "[ranks][ddp][errors]") {
  const auto error = error_of_all(2, [&](const Rank& self) {
    Layered net;
    LayeredModel model(net, in(self));
    std::vector<torch::optim::Optimizer*> none;
    if (self.rank == 1) none.push_back(nullptr);
    model->check_replicas(none);
  });
  CHECK_THAT(
      error, ContainsText("on rank 1 of 2: check_replicas: expected optimizers, got a null"));
}

TEST_CASE("buffers that no averaged pass has shared yet are not compared", "[ranks][ddp]") {
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Layered net;
    LayeredModel model(net, in(self));
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    train_steps(model, optimizer, self.rank, 1);
    {
      const auto guard = model->no_sync();
      model->forward(rows_of(self.rank, 7)).sum().backward();
    }
    if (replicas_equal(*net, self.group)) throw std::runtime_error("the statistics are the same");
    model->check_replicas();
    train_steps(model, optimizer, self.rank, 1);
    if (!replicas_equal(*net, self.group)) throw std::runtime_error("the models differ");

    // On one rank alone.
    if (self.rank == 1) {
      const torch::NoGradGuard no_grad;
      model->forward(rows_of(self.rank, 9));
    }
    model->check_replicas();

    LayeredModel apart(Layered(), in(self).broadcast_buffers(false));
    torch::optim::SGD other(apart->parameters(), 0.01);
    train_steps(apart, other, self.rank, 2);
    apart->check_replicas();
  });
  for (const auto& error : errors) CHECK(error.empty());
}

TEST_CASE("ignored parameters are not compared", "[ranks][ddp]") {
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Layered net;
    const torch::NoGradGuard no_grad;
    net->last->bias.fill_(self.rank);
    LayeredModel model(net, in(self).parameters_to_ignore({"last.bias"}).check_replicas_every(1));
    model->check_replicas();
    const torch::AutoGradMode grad(true);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    train_steps(model, optimizer, self.rank, 2);
    model->check_replicas({&optimizer});
  });
  for (const auto& error : errors) CHECK(error.empty());
}

TEST_CASE("the first averaged pass throws when weights were set after wrapping", "[ranks][ddp]") {
  const std::string mode = GENERATE(
      "plain", "views", "find_unused", "static_graph", "after no_sync", "join", "idle in join",
      "stepped in backward", "low precision", "every");
  CAPTURE(mode);
  const auto seen = run_ranks<std::vector<std::string>>(2, [&](const Rank& self) {
    Layered net;
    auto options = in(self)
                       .gradient_as_bucket_view(mode == "views")
                       .find_unused_parameters(mode == "find_unused")
                       .static_graph(mode == "static_graph");
    if (mode == "low precision") {
      options.mixed_precision(
          MixedPrecision().param_dtype(at::kBFloat16).buffer_dtype(at::kBFloat16));
    }
    if (mode == "every") options.check_replicas_every(100).init_sync(false);
    LayeredModel model(net, options);
    const auto optimizer = std::make_shared<torch::optim::SGD>(model->parameters(), 0.01);
    if (mode == "stepped in backward") model->step_in_backward(optimizer);
    const auto init = [&](double value) {
      const torch::NoGradGuard no_grad;
      net->last->weight.fill_(value);
    };
    init(1 + 1e-6 * self.rank);  // rounds to the same value in 16 bits
    std::vector<std::string> errors;
    errors.push_back(error_of([&] {
      if (mode == "after no_sync") {
        const auto guard = model->no_sync();
        model->forward(rows_of(self.rank, 0)).sum().backward();
      }
      const auto pass = [&] {
        if (mode == "idle in join" && self.rank == 1) return;
        model->forward(rows_of(self.rank, 0)).square().sum().backward();
      };
      mode == "join" || mode == "idle in join" ? model->join(pass) : pass();
    }));
    // The next pass throws too, until refresh().
    errors.push_back(error_of([&] { reduced_backward(model, self.rank, 1); }));
    model->refresh();
    if (mode == "every") init(2);
    errors.push_back(error_of([&] { reduced_backward(model, self.rank, 2); }));
    model->refresh();
    init(3 + self.rank);
    errors.push_back(error_of([&] { reduced_backward(model, self.rank, 3); }));
    // The same on every rank.
    init(4);
    errors.push_back(error_of([&] { reduced_backward(model, self.rank, 4); }));
    return errors;
  });
  CHECK(seen[0] == seen[1]);
  for (const int pass : {0, 1, 3}) {
    CHECK_THAT(
        seen[0][pass],
        ContainsText("DistributedDataParallel: expected the ranks' models to be equal in the first "
                     "averaged backward pass, but parameter \"last.weight\" differs on rank 1"));
  }
  CHECK(seen[0][2].empty());
  CHECK(seen[0][4].empty());
}

TEST_CASE("models that differ on purpose are not compared in the first pass", "[ranks][ddp]") {
  const std::string mode = GENERATE("never", "no init_sync", "ignored");
  CAPTURE(mode);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Layered net;
    auto options = in(self);
    if (mode == "never") options.check_replicas_every(0);
    if (mode == "no init_sync") options.init_sync(false);
    if (mode == "ignored") options.parameters_to_ignore({"last.bias"});
    LayeredModel model(net, options);
    {
      const torch::NoGradGuard no_grad;
      net->last->bias.fill_(self.rank);
    }
    reduced_backward(model, self.rank, 0);
    reduced_backward(model, self.rank, 1);
  });
  for (const auto& error : errors) CHECK(error.empty());
}

TEST_CASE("check_replicas_every finds a difference in the step that it compares", "[ranks][ddp]") {
  const auto threw_in = [](const std::function<void(Layered&, torch::optim::SGD&, int)>& spoil,
                           bool in_backward = false) {
    const auto steps = run_ranks<std::pair<int, std::string>>(3, [&](const Rank& self) {
      Layered net;
      LayeredModel model(net, in(self).check_replicas_every(3));
      const auto optimizer = std::make_shared<torch::optim::SGD>(
          model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
      if (in_backward) model->step_in_backward(optimizer);
      for (int step = 1; step <= 9; ++step) {
        if (self.rank == 2) {
          const torch::NoGradGuard no_grad;
          spoil(net, *optimizer, step);
        }
        const auto error = error_of([&] { reduced_backward(model, self.rank, step); });
        if (!error.empty()) return std::pair(step, error);
        if (!in_backward) optimizer->step();
      }
      return std::pair(0, std::string());
    });
    CHECK(steps[1] == steps[0]);
    CHECK(steps[2] == steps[0]);
    return steps[0];
  };
  for (const bool in_backward : {false, true}) {
    CAPTURE(in_backward);
    CHECK(threw_in([](auto&&...) {}, in_backward).first == 0);
    const auto [step, text] = threw_in(
        [](Layered& net, auto&, int now) {
          if (now == 4) net->first->weight[0][1] += 0.5;
        },
        in_backward);
    CHECK(step == 6);
    CHECK_THAT(text, ContainsText("parameter \"first.weight\"") && ContainsText("on rank 2"));
    // The rate of step 6 is used after the comparison, so step 9 finds the difference.
    const auto [later, of_rate] = threw_in(
        [](Layered&, torch::optim::SGD& optimizer, int now) {
          if (now == 6) optimizer.param_groups()[0].options().set_lr(0.02);
        },
        in_backward);
    CHECK(later == 9);
    CHECK_THAT(of_rate, ContainsText("differs on rank 2"));
    CHECK((of_rate.find("lr of parameter group 0") != std::string::npos) == in_backward);
  }
}

TEST_CASE("check_replicas_every counts the passes of a join, and compares none", "[ranks][ddp]") {
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Layered net;
    LayeredModel model(net, in(self).check_replicas_every(2));
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    train_steps(model, optimizer, self.rank, 1);
    model->join(
        [&] { train_steps(model, optimizer, self.rank, self.rank == 0 ? 5 : 2); },
        JoinOptions().optimizers({&optimizer}));
    train_steps(model, optimizer, self.rank, 4);
    model->check_replicas();
  });
  for (const auto& error : errors) CHECK(error.empty());
}

TEST_CASE("replicas_equal compares bits, of any module", "[ranks][ddp]") {
  const auto equal = [](const std::function<void(Layered&)>& spoil) {
    const auto results = run_ranks<int>(3, [&](const Rank& self) {
      Layered net;
      if (self.rank == 2) {
        const torch::NoGradGuard no_grad;
        spoil(net);
      }
      return static_cast<int>(replicas_equal(*net, self.group));
    });
    CHECK(results == std::vector<int>(3, results[0]));
    return results[0] == 1;
  };
  CHECK(equal([](Layered&) {}));
  CHECK_FALSE(equal([](Layered& net) { net->first->weight[0][0] += 1e-3; }));
  CHECK_FALSE(equal([](Layered& net) { net->norm->num_batches_tracked += 1; }));
  CHECK_FALSE(equal([](Layered& net) { net->norm->running_mean[0] = -0.0; }));
}

TEST_CASE("check_replicas throws inside a join", "[ranks][ddp][errors]") {
  const auto errors = errors_of_ranks(1, [&](const Rank& self) {
    Layered net;
    LayeredModel model(net, in(self));
    model->join([&] { model->check_replicas(); });
  });
  CHECK_THAT(errors[0], ContainsText("check_replicas: expected to be called between two steps"));
  CHECK_THAT(
      errors_of_ranks(
          1,
          [&](const Rank& self) { LayeredModel(Layered(), in(self).check_replicas_every(-1)); })[0],
      ContainsText("for check_replicas_every, got -1"));
}

}  // namespace ddp
