// A sharded optimizer, compared with the same optimizer without sharding.
#include <ddp/zero.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ddp/collectives.h>
#include <ddp/grad_scaler.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/archives.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

using Net = torch::nn::Sequential;
using Model = DistributedDataParallel<Net>;
using OptimizerPtr = std::shared_ptr<torch::optim::Optimizer>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using Tensors = std::vector<at::Tensor>;

Net make_net() {
  Net net(
      torch::nn::Linear(7, 15), torch::nn::ReLU(), torch::nn::Linear(15, 13), torch::nn::ReLU(),
      torch::nn::Linear(13, 3));
  draw_normal(*net, 0.3);
  return net;
}

/// The kind of optimizer: the plain one (stage 0), or a sharded one of a stage.
struct Mode {
  int stage = 0;
  bool overlap = false;
};

constexpr Mode kPlain{};
constexpr double kSmallBuckets = 0.0002;  // a few parameters each

ZeroOptions options_of(const Mode& mode) {
  return ZeroOptions().stage(mode.stage).overlap(mode.overlap);
}

template <typename Optim, typename Options>
OptimizerPtr make(Model& model, const Groups& groups, const Options& options, const Mode& mode) {
  if (mode.stage == 0) return std::make_shared<Optim>(groups, options);
  return std::make_shared<ZeroRedundancyOptimizer<Optim>>(model, groups, options, options_of(mode));
}

/// The net's parameters in two groups, the second with options of its own.
OptimizerPtr make_optimizer(const std::string& kind, Model& model, const Mode& mode) {
  using namespace torch::optim;
  const auto all = model->parameters();
  Groups groups{
      OptimizerParamGroup({all[3], all[0], all[2]}), OptimizerParamGroup({all[1], all[4], all[5]})};
  if (kind == "sgd") {
    return make<SGD>(model, groups, SGDOptions(0.1).momentum(0.9).nesterov(true), mode);
  }
  if (kind == "adam") return make<Adam>(model, groups, AdamOptions(0.01).amsgrad(true), mode);
  if (kind == "adamw") {
    groups[1].set_options(std::make_unique<AdamWOptions>(AdamWOptions(0.02).weight_decay(0.5)));
    return make<AdamW>(model, groups, AdamWOptions(0.01), mode);
  }
  if (kind == "rmsprop") {
    const auto options = RMSpropOptions(0.01).centered(true).momentum(0.5);
    return make<RMSprop>(model, groups, options, mode);
  }
  return make<Adagrad>(model, groups, AdagradOptions(0.01), mode);
}

ZeroRedundancyOptimizerBase* sharded(const OptimizerPtr& optimizer) {
  return dynamic_cast<ZeroRedundancyOptimizerBase*>(optimizer.get());
}

void zero_grad(const OptimizerPtr& optimizer) { ddp::zero_grad(*optimizer); }

at::Tensor input_of(int rank, int64_t step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + rank);
  return at::randn({4, 7}, generator, at::TensorOptions());
}

at::Tensor loss_of(Model& model, const Rank& self, int64_t step) {
  return model->forward(input_of(self.rank, step)).square().mean();
}

/// The parameters after `train` with a model and an optimizer; the same on every rank.
Tensors run(
    int world, const std::string& kind, const Mode& mode,
    const std::function<void(Model&, const OptimizerPtr&, const Rank&)>& train,
    const DistributedDataParallelOptions& given = {}) {
  const auto values = run_ranks<Tensors>(world, [&](const Rank& self) {
    auto options = given;
    Model model(make_net(), options.process_group(self.group).bucket_cap_mb(kSmallBuckets));
    const auto optimizer = make_optimizer(kind, model, mode);
    train(model, optimizer, self);
    return copies_of(model->parameters());
  });
  for (const auto& of_rank : values) REQUIRE(all_equal(of_rank, values[0]));
  return values[0];
}

/// With more than two ranks, Gloo's reduce-scatter (stage 2) sums in another order.
void check_same(const Tensors& got, const Tensors& expected, int world, int stage) {
  const char* backend = std::getenv("DDP_TEST_BACKEND");
  const bool sums_alike = stage < 2 || world < 3 || (backend && backend != std::string("gloo"));
  if (sums_alike) {
    CHECK(all_equal(got, expected));
  } else {
    CHECK(largest_difference(got, expected) < 1e-5);
  }
}

}  // namespace

TEST_CASE("a sharded optimizer steps as the plain one", "[zero][ranks]") {
  const std::string kind = GENERATE("sgd", "adam", "adamw", "rmsprop", "adagrad");
  const int world = GENERATE(1, 2, 3);
  const auto train = [](Model& model, const OptimizerPtr& optimizer, const Rank& self) {
    torch::optim::StepLR schedule(*optimizer, 2, 0.5);
    for (int64_t step = 0; step < 5; ++step) {
      zero_grad(optimizer);
      loss_of(model, self, step).backward();
      optimizer->step();
      schedule.step();
    }
  };
  const auto expected = run(world, kind, kPlain, train);
  for (const auto& mode : {Mode{1}, Mode{2}, Mode{1, true}, Mode{2, true}}) {
    CAPTURE(kind, world, mode.stage, mode.overlap);
    check_same(run(world, kind, mode, train), expected, world, mode.stage);
  }
}

TEST_CASE("a sharded optimizer takes gradients that accumulate", "[zero][ranks]") {
  const auto train = [](Model& model, const OptimizerPtr& optimizer, const Rank& self) {
    int64_t batch = 0;
    for (int64_t step = 0; step < 3; ++step) {
      zero_grad(optimizer);
      {
        const auto guard = model->no_sync();
        loss_of(model, self, batch++).backward();
      }
      loss_of(model, self, batch++).backward();
      // A second averaged pass accumulates on the first.
      loss_of(model, self, batch++).backward();
      optimizer->step();
    }
  };
  const auto expected = run(2, "adamw", kPlain, train);
  CHECK(all_equal(run(2, "adamw", Mode{1}, train), expected));
  CHECK(largest_difference(run(2, "adamw", Mode{2}, train), expected) < 1e-5);
}

TEST_CASE("stage 2 clears the gradients in a step, without zero_grad", "[zero][ranks]") {
  const auto train = [](bool clears) {
    return [clears](Model& model, const OptimizerPtr& optimizer, const Rank& self) {
      for (int64_t step = 0; step < 3; ++step) {
        if (clears) model->zero_grad();
        loss_of(model, self, step).backward();
        optimizer->step();
      }
    };
  };
  CHECK(all_equal(run(2, "sgd", Mode{2}, train(true)), run(2, "sgd", kPlain, train(true))));
  CHECK(all_equal(run(2, "sgd", Mode{2}, train(false)), run(2, "sgd", kPlain, train(true))));
}

TEST_CASE("a parameter without a gradient is not stepped", "[zero][ranks]") {
  const auto mode = GENERATE(Mode{1}, Mode{2}, Mode{1, true}, Mode{2, true});
  struct Halves : torch::nn::Module {
    torch::nn::Linear first = register_module("first", torch::nn::Linear(7, 5));
    torch::nn::Linear second = register_module("second", torch::nn::Linear(7, 5));
    at::Tensor forward(const at::Tensor& x, bool both) {
      return both ? first->forward(x) + second->forward(x) : first->forward(x);
    }
  };
  const auto end_of = [](const Mode& how) {
    const auto values = run_ranks<Tensors>(2, [&](const Rank& self) {
      torch::manual_seed(5);
      auto halves = std::make_shared<Halves>();
      {
        const torch::NoGradGuard no_grad;
        for (auto& p : halves->parameters()) p.fill_(0.5);
      }
      DistributedDataParallel model(
          halves, in(self).find_unused_parameters(true).bucket_cap_mb(kSmallBuckets));
      using torch::optim::AdamW;
      const torch::optim::AdamWOptions options(0.1);
      OptimizerPtr optimizer;
      if (how.stage == 0) {
        optimizer = std::make_shared<AdamW>(model->parameters(), options);
      } else {
        optimizer =
            std::make_shared<ZeroRedundancyOptimizer<AdamW>>(model, options, options_of(how));
      }
      for (int64_t step = 0; step < 5; ++step) {
        zero_grad(optimizer);
        // Step 3: used on rank 1 alone.
        const bool both = step == 1 || (step == 3 && self.rank == 1);
        model->forward(input_of(self.rank, step), both).square().mean().backward();
        optimizer->step();
      }
      return copies_of(model->parameters());
    });
    REQUIRE(all_equal(values[0], values[1]));
    return values[0];
  };
  CHECK(all_equal(end_of(mode), end_of(kPlain)));
}

TEST_CASE("stage 2 keeps only this rank's part of the gradients", "[zero][ranks]") {
  const auto sizes = run_ranks<std::vector<int64_t>>(3, [](const Rank& self) {
    Model model(make_net(), in(self).bucket_cap_mb(kSmallBuckets));
    ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
        model, torch::optim::AdamWOptions(0.1), ZeroOptions().stage(2));
    loss_of(model, self, 0).backward();
    int64_t whole = 0;
    for (const auto& p : model->parameters()) whole += p.grad().defined();
    int64_t part = 0;
    for (const auto& gradient : optimizer.gradients()) part += gradient.numel();
    optimizer.step();
    return std::vector<int64_t>{
        whole, part, static_cast<int64_t>(optimizer.local_state_bytes()),
        static_cast<int64_t>(optimizer.gradients().size())};
  });
  int64_t elements = 0;
  for (const auto& p : make_net()->parameters()) elements += p.numel();
  constexpr int64_t kBytes = 2 * sizeof(float);  // of AdamW's state per element
  const int64_t buckets = 6;                     // at most
  int64_t parts = 0;
  for (const auto& size : sizes) {
    CHECK(size[0] == 0);
    CHECK(size[2] <= elements * kBytes / 3 + 64 * buckets);
    CHECK(size[3] == 0);  // released by the step
    parts += size[1];
  }
  CHECK(parts == elements);
}

TEST_CASE("channels-last parameters keep their strides", "[zero][ranks]") {
  const auto mode = GENERATE(Mode{1}, Mode{2});
  const auto end_of = [](const Mode& how) {
    return run_ranks<Tensors>(2, [&](const Rank& self) {
      torch::manual_seed(3);
      Net net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3)));
      draw_normal(*net, 0.3);
      auto& weight = net->ptr(0)->as<torch::nn::Conv2dImpl>()->weight;
      weight.set_data(weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
      Model model(net, in(self));
      const auto options = torch::optim::AdamOptions(0.1);
      const auto optimizer = make<torch::optim::Adam>(
          model, {torch::optim::OptimizerParamGroup(model->parameters())}, options, how);
      for (int64_t step = 0; step < 3; ++step) {
        zero_grad(optimizer);
        auto generator = at::make_generator<at::CPUGeneratorImpl>(10 * step + self.rank);
        const auto x = at::randn({2, 3, 6, 6}, generator, at::TensorOptions())
                           .contiguous(at::MemoryFormat::ChannelsLast);
        model->forward(x).square().mean().backward();
        optimizer->step();
      }
      TORCH_CHECK(model->parameters()[0].is_contiguous(at::MemoryFormat::ChannelsLast));
      return copies_of(model->parameters());
    });
  };
  CHECK(all_equal(end_of(mode)[0], end_of(kPlain)[0]));
}

TEST_CASE("parameters whose data is replaced are still stepped", "[zero][ranks]") {
  const Mode mode = GENERATE(Mode{1}, Mode{2}, Mode{1, true}, Mode{2, true});
  CAPTURE(mode.stage, mode.overlap);
  const auto train = [](const Mode& of, const Rank& self) {
    auto model = Model(make_net(), in(self).bucket_cap_mb(kSmallBuckets));
    const auto optimizer = make_optimizer("adam", model, of);
    for (int step = 0; step < 4; ++step) {
      zero_grad(optimizer);
      loss_of(model, self, step).backward();
      optimizer->step();
      // torch::load and clipping of weights do this.
      if (step == 1) {
        for (auto& p : model->parameters()) p.set_data(p.detach().clamp(-0.2, 0.2));
      }
    }
    return copies_of(model->parameters());
  };
  const auto right = run_ranks<char>(2, [&](const Rank& self) {
    return static_cast<char>(largest_difference(train(mode, self), train(kPlain, self)) < 1e-6);
  });
  CHECK(right == std::vector<char>(2, 1));
}

TEST_CASE("an overlapping optimizer refuses a model that was refreshed", "[zero][ranks][errors]") {
  const int stage = GENERATE(1, 2);
  const auto seen = run_ranks<std::vector<std::string>>(2, [&](const Rank& self) {
    auto net = make_net();
    Model model(net, in(self));
    const auto make = [&] {
      return std::make_unique<ZeroRedundancyOptimizer<torch::optim::SGD>>(
          model, torch::optim::SGDOptions(0.1), ZeroOptions().stage(stage).overlap(true));
    };
    const auto step = [&] { model->forward(torch::ones({1, 7})).sum().backward(); };
    auto optimizer = make();
    step();
    model->refresh();
    const std::vector<std::string> errors{error_of(step), error_of([&] { optimizer->step(); })};
    // Another one takes its place, or none.
    optimizer = make();
    step();
    model->refresh();
    optimizer.reset();
    step();
    return errors;
  });
  for (const auto& of_rank : seen) {
    CHECK_THAT(of_rank, Each(ContainsText("expected the model as it was when this was made")));
  }
}

TEST_CASE("a new sharded optimizer works after a parameter grew and refresh", "[zero][ranks]") {
  const Mode mode = GENERATE(Mode{1}, Mode{2}, Mode{1, true}, Mode{2, true});
  CAPTURE(mode.stage, mode.overlap);
  const auto train = [](const Mode& of, const Rank& self) {
    auto net = make_net();
    auto model = Model(net, in(self).bucket_cap_mb(kSmallBuckets));
    auto optimizer = make_optimizer("adam", model, of);
    for (int step = 0; step < 4; ++step) {
      zero_grad(optimizer);
      loss_of(model, self, step).backward();
      optimizer->step();
      if (step != 1) continue;
      optimizer.reset();
      auto last = net->parameters()[4];
      auto bias = net->parameters()[5];
      last.set_data(torch::cat({last.detach(), last.detach()}));
      bias.set_data(torch::cat({bias.detach(), bias.detach()}));
      model->refresh();
      optimizer = make_optimizer("adam", model, of);
    }
    return copies_of(model->parameters());
  };
  const auto right = run_ranks<char>(2, [&](const Rank& self) {
    return static_cast<char>(largest_difference(train(mode, self), train(kPlain, self)) < 1e-6);
  });
  CHECK(right == std::vector<char>(2, 1));
}

TEST_CASE("ranks without input step with the others", "[zero][ranks]") {
  const auto mode = GENERATE(Mode{1}, Mode{2}, Mode{2, true});
  const auto train = [&](Model& model, const OptimizerPtr& optimizer, const Rank& self) {
    auto* zero = sharded(optimizer);
    std::vector<Joinable*> joinables{model.get()};
    JoinOptions options;
    if (!zero) options.optimizers({optimizer.get()});
    if (zero && !zero->options().overlap()) joinables.push_back(zero);
    const auto body = [&](int64_t batches) {
      return [&, batches] {
        for (int64_t step = 0; step < batches; ++step) {
          zero_grad(optimizer);
          loss_of(model, self, step).backward();
          optimizer->step();
        }
      };
    };
    ddp::join(joinables, body(self.rank == 0 ? 2 : 5), options);
    ddp::join(joinables, body(self.rank == 0 ? 3 : 1), options);
  };
  CHECK(all_equal(run(2, "adam", mode, train), run(2, "adam", kPlain, train)));
}

TEST_CASE("ddp's clipping equals LibTorch's for any optimizer", "[zero][ranks]") {
  const auto mode = GENERATE(Mode{0}, Mode{1}, Mode{2});
  const double norm_type = GENERATE(1.0, 2.0, std::numeric_limits<double>::infinity());
  const auto norms = [&](bool by_torch) {
    return [by_torch, norm_type](Model& model, const OptimizerPtr& optimizer, const Rank& self) {
      for (int64_t step = 0; step < 3; ++step) {
        zero_grad(optimizer);
        loss_of(model, self, step).backward();
        const double norm =
            by_torch ? torch::nn::utils::clip_grad_norm_(model->parameters(), 0.05, norm_type)
                     : clip_grad_norm_(*optimizer, 0.05, norm_type);
        TORCH_CHECK(norm > 0.05, "nothing to clip");
        optimizer->step();
      }
    };
  };
  CHECK(
      largest_difference(run(2, "sgd", mode, norms(false)), run(2, "sgd", kPlain, norms(true))) <
      1e-6);
  const auto values = [](bool by_torch) {
    return [by_torch](Model& model, const OptimizerPtr& optimizer, const Rank& self) {
      loss_of(model, self, 0).backward();
      by_torch ? torch::nn::utils::clip_grad_value_(model->parameters(), 0.01)
               : clip_grad_value_(*optimizer, 0.01);
      optimizer->step();
    };
  };
  CHECK(all_equal(run(2, "sgd", mode, values(false)), run(2, "sgd", kPlain, values(true))));
}

TEST_CASE("averages that zero_grad discards are not stepped", "[zero][ranks]") {
  const auto mode = GENERATE(Mode{1}, Mode{2});
  const bool by_model = GENERATE(false, true);
  const auto train = [&](Model& model, const OptimizerPtr& optimizer, const Rank& self) {
    loss_of(model, self, 0).backward();
    by_model ? model->zero_grad() : zero_grad(optimizer);
    loss_of(model, self, 1).backward();
    optimizer->step();
  };
  CHECK(all_equal(run(2, "sgd", mode, train), run(2, "sgd", kPlain, train)));
}

TEST_CASE("the state of four ranks loads on two, on one, and without sharding", "[zero][ranks]") {
  const std::string kind = GENERATE("sgd", "adam", "adamw", "rmsprop", "adagrad");
  const auto mode = GENERATE(Mode{1}, Mode{2});
  const auto load = [](torch::optim::Optimizer& optimizer, const std::string& text) {
    auto archive = archive_of(text);
    optimizer.load(archive);
  };
  // Every rank trains on the same data, so the average does not depend on the number of ranks.
  const auto train = [](Model& model, const OptimizerPtr& optimizer, int64_t first, int64_t end) {
    for (auto step = first; step < end; ++step) {
      zero_grad(optimizer);
      model->forward(input_of(0, step)).square().mean().backward();
      optimizer->step();
    }
  };
  const auto whole = run(1, kind, kPlain, [&](auto& model, const auto& optimizer, const Rank&) {
    train(model, optimizer, 0, 6);
  });
  std::string state;
  const auto half = run(4, kind, mode, [&](auto& model, const auto& optimizer, const Rank& self) {
    train(model, optimizer, 0, 3);
    const auto text = bytes_of_archive(*optimizer);
    if (self.rank == 0) state = text;
  });
  for (const int world : {1, 2, 3}) {
    for (const auto& reader : {kPlain, mode}) {
      CAPTURE(kind, world, reader.stage);
      const auto end =
          run(world, kind, reader, [&](auto& model, const auto& optimizer, const Rank&) {
            {
              const torch::NoGradGuard no_grad;
              const auto parameters = model->parameters();
              for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(half[i]);
            }
            load(*optimizer, state);
            train(model, optimizer, 3, 6);
          });
      CHECK(largest_difference(end, whole) < 1e-6);
    }
  }
}

TEST_CASE("a sharded optimizer throws for what it does not support", "[zero][errors][ranks]") {
  using torch::optim::SGD;
  using torch::optim::SGDOptions;
  const auto error = [](const std::function<void(Model&, const Rank&)>& body, int world = 1) {
    return errors_of_ranks(world, [&](const Rank& self) {
      Model model(make_net(), in(self));
      body(model, self);
    })[0];
  };
  using Zero = ZeroRedundancyOptimizer<SGD>;
  const SGDOptions sgd(0.1);
  CHECK_THAT(
      error([&](Model& model, const Rank&) { Zero(model, sgd, ZeroOptions().stage(3)); }),
      ContainsText("expected stage 1 or 2, got 3"));
  CHECK_THAT(
      error([&](Model& model, const Rank&) {
        const Tensors others{torch::ones({2}).requires_grad_()};
        Zero(model, {torch::optim::OptimizerParamGroup(others)}, sgd);
      }),
      ContainsText("expected parameters of the model") && ContainsText("parameter 0 of group 0"));
  CHECK_THAT(
      error([&](Model& model, const Rank& self) {
        const auto other = c10::make_intrusive<c10d::ProcessGroup>(self.rank, self.size);
        Zero(model, sgd, ZeroOptions().stage(2).process_group(other));
      }),
      ContainsText("expected the model's process group with stage 2"));
  CHECK_THAT(
      error([&](Model& model, const Rank&) {
        model->register_comm_hook(hooks::noop());
        Zero(model, sgd, ZeroOptions().stage(2));
      }),
      ContainsText("a communication hook is registered already"));
  CHECK_THAT(
      error([&](Model& model, const Rank&) {
        Zero zero(model, sgd, ZeroOptions().stage(2));
        model->step_in_backward(std::make_shared<SGD>(model->parameters(), sgd));
      }),
      ContainsText("expected gradients on every rank"));
  for (const bool overlaps : {false, true}) {
    CHECK_THAT(
        error([&](Model& model, const Rank&) {
          model->step_in_backward(
              std::make_shared<Zero>(model, sgd, ZeroOptions().stage(1).overlap(overlaps)));
        }),
        ContainsText("Set overlap(true) there, which steps each bucket"));
  }
  CHECK_THAT(
      error([&](Model& model, const Rank&) {
        Zero zero(model, sgd);
        model->refresh();
        zero.step();
      }),
      ContainsText("after refresh() or rebind() on rank 0"));
  CHECK_THAT(
      error([&](Model& model, const Rank&) {
        Zero zero(model, sgd);
        zero.add_param_group(
            torch::optim::OptimizerParamGroup(Tensors{torch::ones({2}).requires_grad_()}));
        zero.step();
      }),
      ContainsText("expected the 1 groups"));
  CHECK_THAT(
      error([&](Model& model, const Rank& self) {
        Zero zero(model, sgd);
        model->join([&] {
          loss_of(model, self, 0).backward();
          zero.step();
        });
      }),
      ContainsText("expected to be part of the join()"));
  CHECK_THAT(
      error([&](Model& model, const Rank&) {
        Zero zero(model, sgd, ZeroOptions().stage(2));
        clip_grad_norm_(zero, 1, 0);
      }),
      ContainsText("norm_type above 0 for parts of tensors, got 0"));
  CHECK_THAT(
      error(
          [&](Model& model, const Rank& self) {
            Zero zero(model, sgd, ZeroOptions().stage(2));
            loss_of(model, self, 0).backward();
            clip_grad_norm_(*model, 1);
          },
          2),
      ContainsText("clip_grad_norm_: expected gradients on every rank") &&
          ContainsText("on rank 0 of 2. Call clip_grad_norm_(optimizer, max_norm)."));
  CHECK_THAT(
      errors_of_ranks(
          1,
          [&](const Rank& self) {
            Net net(torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true)));
            Model model(net, in(self));
            Zero zero(model, sgd);
          })[0],
      ContainsText("\"0.weight\", whose are sparse"));
  CHECK_THAT(
      error(
          [&](Model& model, const Rank& self) {
            Zero zero(model, sgd, ZeroOptions().stage(self.rank == 0 ? 1 : 2));
            loss_of(model, self, 0).backward();
          },
          2),
      ContainsText("sharded gradients"));
}

TEST_CASE(
    "every rank throws when one rank fails to build the gathered state", "[zero][errors][ranks]") {
  const auto errors = errors_of_ranks(2, kLongTimeout, [](const Rank& self) {
    Model model(make_net(), in(self));
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(model, torch::optim::SGDOptions(0.1));
    // Rank 0 alone makes the optimizer without sharding, which throws for this learning rate.
    zero.defaults().set_lr(-1);
    zero.consolidated(0);
  });
  for (const auto& error : errors) CHECK_THAT(error, ContainsText("Invalid learning rate: -1"));
}

TEST_CASE("loading a state that does not fit keeps the old state", "[zero][errors][ranks]") {
  const auto train = [](bool loads) {
    return [loads](Model& model, const OptimizerPtr& optimizer, const Rank& self) {
      for (int64_t step = 0; step < 4; ++step) {
        if (loads && step == 2) {
          const auto whole = sharded(optimizer)->consolidated();
          auto& states = whole->state();
          auto& last = states.at(model->parameters()[0].unsafeGetTensorImpl());
          static_cast<torch::optim::SGDParamState&>(*last).momentum_buffer(torch::ones({2}));
          const auto error =
              testing::error_of<c10::ValueError>([&] { sharded(optimizer)->load_whole(*whole); });
          TORCH_CHECK(error.find("of the parameter's shape") != std::string::npos, error);
        }
        zero_grad(optimizer);
        loss_of(model, self, step).backward();
        optimizer->step();
      }
    };
  };
  // The last rank holds the last parts of the buckets, and so the parameter.
  CHECK(all_equal(run(1, "sgd", Mode{1}, train(true)), run(1, "sgd", Mode{1}, train(false))));
}

TEST_CASE("a step of stage 2 without an averaged pass throws", "[zero][errors][ranks]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    Model model(make_net(), in(self));
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(
        model, torch::optim::SGDOptions(0.1), ZeroOptions().stage(2));
    zero.step();  // does nothing without gradients
    {
      const auto guard = model->no_sync();
      loss_of(model, self, 0).backward();
    }
    zero.step();
  });
  for (const auto& error : errors) CHECK_THAT(error, ContainsText("under no_sync() alone on rank"));
}

TEST_CASE("clipping throws where it would not reach all gradients", "[zero][errors][ranks]") {
  const bool by_value = GENERATE(false, true);
  const auto mode = GENERATE(Mode{1}, Mode{2}, Mode{1, true});
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Model model(make_net(), in(self));
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(
        model, torch::optim::SGDOptions(0.1), options_of(mode));
    const auto clip = [&] {
      by_value ? clip_grad_value_(zero, 0.1) : void(clip_grad_norm_(zero, 0.1));
    };
    if (mode.overlap) {
      loss_of(model, self, 0).backward();
      clip();
      return;
    }
    ddp::join({model.get(), &zero}, [&] {
      for (int64_t step = 0; step <= self.rank; ++step) {
        loss_of(model, self, step).backward();
        clip();
        zero.step();
      }
    });
  });
  CHECK_THAT(errors, Each(ContainsText(mode.overlap ? "Set overlap(false)" : "in a join()")));
}

TEST_CASE("a GradScaler throws in a join", "[zero][errors][ranks]") {
  const auto mode = GENERATE(Mode{1}, Mode{2});
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Model model(make_net(), in(self));
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(
        model, torch::optim::SGDOptions(0.1), options_of(mode));
    GradScaler scaler;
    ddp::join({model.get(), &zero}, [&] {
      for (int64_t step = 0; step <= self.rank; ++step) {
        scaler.scale(loss_of(model, self, step)).backward();
        scaler.step(zero);
        scaler.update();
      }
    });
  });
  CHECK_THAT(errors, Each(ContainsText("expected every rank to unscale")));
}

TEST_CASE(
    "a sharded optimizer works with more ranks than elements, mixed dtypes and a static graph",
    "[zero][ranks][many]") {
  const auto mode = GENERATE(Mode{1}, Mode{2}, Mode{1, true}, Mode{2, true});
  const bool is_static = GENERATE(false, true);
  struct Mixed : torch::nn::Module {
    at::Tensor one = register_parameter("one", torch::full({}, 0.5));
    at::Tensor two = register_parameter("two", torch::full({2}, 0.25, at::kDouble));
    at::Tensor complex = register_parameter("complex", torch::ones({3}, at::kComplexFloat));
    at::Tensor frozen = register_parameter("frozen", torch::ones({2}), /*requires_grad=*/false);
    at::Tensor forward(const at::Tensor& x) {
      return one * x.mean() + (two * x.mean()).sum().to(at::kFloat) +
             torch::real(complex * torch::conj(complex)).sum() * x.mean() + frozen.sum();
    }
  };
  const auto end_of = [&](const Mode& how) {
    const auto values = run_ranks<Tensors>(4, [&](const Rank& self) {
      auto net = std::make_shared<Mixed>();
      DistributedDataParallel model(net, in(self).static_graph(is_static));
      OptimizerPtr optimizer;
      const torch::optim::SGDOptions options = torch::optim::SGDOptions(0.1).momentum(0.9);
      if (how.stage == 0) {
        optimizer = std::make_shared<torch::optim::SGD>(model->parameters(), options);
      } else {
        optimizer = std::make_shared<ZeroRedundancyOptimizer<torch::optim::SGD>>(
            model, options, options_of(how));
      }
      for (int64_t step = 0; step < 4; ++step) {
        zero_grad(optimizer);
        model->forward(input_of(self.rank, step)).backward();
        optimizer->step();
      }
      return copies_of(model->parameters());
    });
    for (const auto& of_rank : values) REQUIRE(all_equal(of_rank, values[0]));
    return values[0];
  };
  CHECK(largest_difference(end_of(mode), end_of(kPlain)) < 1e-6);
}

}  // namespace ddp
