#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

// Weights that depend on `seed` alone: all rank-threads share torch's global generator.
template <typename M>
void randomize(M& module, int seed) {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (auto& p : module->parameters()) p.uniform_(-0.5, 0.5, generator);
}

torch::nn::Sequential make_mlp(int seed) {
  torch::nn::Sequential net(torch::nn::Linear(6, 30), torch::nn::Tanh(), torch::nn::Linear(30, 3));
  randomize(net, seed);
  return net;
}

// Batch norm and a buffer; broadcasts keep them equal on all ranks.
class NormNetImpl : public torch::nn::Module {
 public:
  NormNetImpl() {
    norm_ = register_module("norm", torch::nn::BatchNorm1d(4));
    fc_ = register_module("fc", torch::nn::Linear(4, 2));
    counter = register_buffer("counter", torch::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) { return fc_(norm_(x)); }
  torch::nn::BatchNorm1dImpl& norm() { return *norm_; }

  at::Tensor counter;

 private:
  torch::nn::BatchNorm1d norm_{nullptr};
  torch::nn::Linear fc_{nullptr};
};
TORCH_MODULE(NormNet);

}  // namespace

TEST_CASE("ranks train as one process with the whole batch", "[ranks][ddp][many]") {
  const int size = GENERATE(1, 2, 3, 4);
  const bool as_views = GENERATE(false, true);
  const double cap_mb = GENERATE(1e-4, 25.0);
  CAPTURE(size, as_views, cap_mb);
  const int per_rank = 4;
  const auto batch = [&](int step) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(step);
    return torch::randn({12 * per_rank, 6}, generator).narrow(0, 0, size * per_rank);
  };
  const auto loss_of = [](const at::Tensor& y) { return y.pow(2).mean(); };

  auto whole = make_mlp(1);
  torch::optim::SGD whole_optimizer(whole->parameters(), 0.5);
  for (int step = 0; step < 10; ++step) {
    whole_optimizer.zero_grad();
    loss_of(whole->forward(batch(step))).backward();
    whole_optimizer.step();
  }

  const auto trained = run_ranks<at::Tensor>(size, [&](const Rank& self) {
    auto net = make_mlp(1 + self.rank);  // rank 0's weights are broadcast
    DistributedDataParallel model(
        net, in(self).bucket_cap_mb(cap_mb).gradient_as_bucket_view(as_views));
    torch::optim::SGD optimizer(model->parameters(), 0.5);
    for (int step = 0; step < 10; ++step) {
      optimizer.zero_grad();
      const auto x = batch(step).narrow(0, self.rank * per_rank, per_rank);
      loss_of(model->forward(x)).backward();
      optimizer.step();
    }
    return flattened(net->parameters());
  });
  for (const auto& parameters : trained) {
    CHECK(torch::equal(parameters, trained[0]));  // replicas, bit for bit
    CHECK(torch::allclose(parameters, flattened(whole->parameters()), 1e-4, 1e-6));
  }
}

TEST_CASE("construction gives all ranks rank 0's parameters and buffers", "[ranks][ddp][many]") {
  const bool init_sync = GENERATE(true, false);
  const auto states = run_ranks<at::Tensor>(3, [&](const Rank& self) {
    NormNet net;
    randomize(net, self.rank);
    net->counter.fill_(self.rank + 7);
    net->parameters()[3].set_requires_grad(false);  // frozen parameters are broadcast too
    DistributedDataParallel model(net, in(self).init_sync(init_sync));
    auto state = net->parameters();
    state.push_back(net->counter);
    return flattened(state);
  });
  CHECK(torch::equal(states[0], states[1]) == init_sync);
  CHECK(torch::equal(states[0], states[2]) == init_sync);
}

TEST_CASE(
    "buffers are shared in averaged backward passes, and nowhere else", "[ranks][ddp][many]") {
  const bool is_static = GENERATE(false, true);
  const auto seen = run_ranks<std::vector<float>>(3, [&](const Rank& self) {
    NormNet net;
    DistributedDataParallel model(net, in(self).static_graph(is_static));
    std::vector<float> seen;
    const auto forward = [&] {
      net->counter.fill_(self.rank + 1);
      return model->forward(torch::randn({8, 4})).sum();
    };
    const auto note = [&] { seen.push_back(net->counter.item<float>()); };
    forward().backward();
    note();
    {
      const torch::NoGradGuard no_grad;
      forward();
      note();  // an evaluation shares no buffers
    }
    forward();
    note();  // nor does a forward pass without backward
    {
      const auto guard = model->no_sync();
      forward().backward();
      note();
    }
    forward().backward();
    note();
    const auto first = forward();
    net->counter.fill_(7 * (self.rank + 1));
    (first + model->forward(torch::randn({8, 4})).sum()).backward();
    note();  // rank 0's values after its last forward pass
    net->counter = net->register_buffer("counter2", torch::zeros({1}));
    forward().backward();
    note();  // with a buffer that was replaced
    net->counter.fill_(self.rank + 1);
    model->sync_buffers();
    note();
    return seen;
  });
  CHECK(seen[0] == std::vector<float>{1, 1, 1, 1, 1, 7, 1, 1});
  CHECK(seen[1] == std::vector<float>{1, 2, 2, 2, 1, 7, 1, 1});
  CHECK(seen[2] == std::vector<float>{1, 3, 3, 3, 1, 7, 1, 1});
}

TEST_CASE("broadcast_buffers(false) and ignored buffers stay local", "[ranks][ddp]") {
  const bool ignore = GENERATE(false, true);
  const auto counters = run_ranks<float>(2, [&](const Rank& self) {
    NormNet net;
    auto options = in(self);
    if (ignore) {
      options.parameters_to_ignore({"counter"});
    } else {
      options.broadcast_buffers(false);
    }
    net->counter.fill_(self.rank + 1);
    DistributedDataParallel model(net, options);
    for (int i = 0; i < 2; ++i) model->forward(torch::randn({8, 4})).sum().backward();
    model->sync_buffers();
    return net->counter.item<float>();
  });
  CHECK(counters == std::vector<float>{1, 2});
}

TEST_CASE("a clone is a copy of the wrapped module without the wrapper", "[ranks][ddp]") {
  struct CloneableNetImpl : torch::nn::Cloneable<CloneableNetImpl> {
    CloneableNetImpl() { reset(); }
    void reset() override {
      fc = register_module("fc", torch::nn::Linear(4, 2));
      passes = register_buffer("passes", torch::zeros({1}));
    }
    at::Tensor forward(const at::Tensor& x) {
      passes.add_(1);
      return fc(x);
    }
    torch::nn::Linear fc{nullptr};
    at::Tensor passes;
  };
  const bool low_precision = GENERATE(false, true);
  CAPTURE(low_precision);
  const auto right = run_ranks<std::vector<int>>(2, [&](const Rank& self) {
    const auto net = std::make_shared<CloneableNetImpl>();
    randomize(net, 1);
    auto options = in(self);
    if (low_precision) options.mixed_precision(MixedPrecision().param_dtype(at::kBFloat16));
    DistributedDataParallel model(net, options);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const auto train = [&] {
      optimizer.zero_grad();
      model->forward(torch::full({3, 4}, 1.0 + self.rank)).sum().backward();
      optimizer.step();
    };
    train();
    const std::shared_ptr<CloneableNetImpl> copy = model->snapshot();
    const auto plain = model->clone();
    const auto before = flattened(net->parameters());
    train();
    std::vector<int> right{
        !torch::equal(flattened(net->parameters()), before),
        torch::equal(flattened(copy->parameters()), before),
        copy->passes.item<int>() == 1,
        net->passes.item<int>() == 2,
        torch::equal(flattened(plain->parameters()), before),
        copy->parameters()[0].scalar_type() == at::kFloat,
        plain->named_parameters().keys() == net->named_parameters().keys()};
    // On one rank alone: clone() is not collective.
    if (self.rank == 0) {
      copy->forward(torch::ones({3, 4})).sum().backward();
      right.push_back(copy->fc->bias.grad().defined());
    }
    train();
    return right;
  });
  for (const auto& of_rank : right) {
    for (const int is_right : of_rank) CHECK(is_right == 1);
  }
  const auto errors = errors_of_ranks(1, [](const Rank& self) {
    DistributedDataParallel model(NormNet(), in(self));
    model->clone();
  });
  CHECK_THAT(errors[0], ContainsText("NormNetImpl") && ContainsText("Cloneable"));
  const auto typed = run_ranks<int>(1, [](const Rank& self) {
    DistributedDataParallel model(make_mlp(1), in(self));
    const torch::nn::Sequential copy = model->snapshot();
    return static_cast<int>(copy->size());
  });
  CHECK(typed[0] == 3);
}

TEST_CASE("two forwards before a backward work with BatchNorm", "[ranks][ddp]") {
  const auto gradients = run_ranks<at::Tensor>(2, [](const Rank& self) {
    NormNet net;
    randomize(net, 5);
    DistributedDataParallel model(net, in(self));
    auto generator = at::make_generator<at::CPUGeneratorImpl>(self.rank);
    const auto a = model->forward(torch::randn({8, 4}, generator));
    const auto b = model->forward(torch::randn({8, 4}, generator));
    (a.pow(2).sum() + b.pow(2).sum()).backward();
    return flattened(gradients_of(*net));
  });
  CHECK(torch::equal(gradients[0], gradients[1]));
  CHECK(gradients[0].abs().sum().item<float>() > 0);
}

TEST_CASE("no_sync accumulates locally until the next synchronised pass", "[ranks][ddp]") {
  const bool as_views = GENERATE(false, true);
  struct Seen {
    at::Tensor local, averaged;
  };
  const auto seen = run_ranks<Seen>(2, [&](const Rank& self) {
    torch::nn::Linear net(torch::nn::LinearOptions(3, 1).bias(false));
    DistributedDataParallel model(net, in(self).gradient_as_bucket_view(as_views));
    const auto pass = [&](float x) {
      model->forward(torch::full({1, 3}, x * (self.rank + 1))).sum().backward();
    };
    pass(1);  // so that, with views, gradients are in the bucket already
    net->weight.mutable_grad().zero_();
    Seen seen;
    {
      const auto guard = model->no_sync();
      pass(1);
      {
        const auto inner = model->no_sync();
        pass(2);
      }
      pass(3);  // the inner guard has restored no_sync
      seen.local = net->weight.grad().clone();
    }
    pass(4);
    seen.averaged = net->weight.grad().clone();
    return seen;
  });
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(torch::equal(seen[rank].local, torch::full({1, 3}, 6.0 * (rank + 1))));
    CHECK(torch::equal(seen[rank].averaged, torch::full({1, 3}, 15.0)));
  }
}

TEST_CASE("no_sync ends with its scope, also after an exception", "[ranks][ddp]") {
  const auto gradients = run_ranks<float>(2, [](const Rank& self) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(net, in(self));
    try {
      const auto guard = model->no_sync();
      throw std::runtime_error("user error");
    } catch (const std::runtime_error&) {
    }
    model->forward(torch::full({1, 1}, self.rank + 1.0)).sum().backward();
    return net->weight.grad().item<float>();
  });
  CHECK(gradients == std::vector<float>{1.5, 1.5});
}

TEST_CASE("one rank may evaluate alone", "[ranks][ddp]") {
  const auto losses = run_ranks<float>(2, [](const Rank& self) {
    auto net = make_mlp(1);  // no buffers: no collective in forward
    DistributedDataParallel model(net, in(self));
    const auto x = torch::ones({2, 6});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model->forward(x * (self.rank + 1)).sum().backward();
      if (self.rank == 0) {
        const torch::NoGradGuard no_grad;
        for (int i = 0; i < 5; ++i) model->forward(x);
      }
    }
    return net->parameters()[0].grad().sum().item<float>();
  });
  CHECK(losses[0] == losses[1]);
}

TEST_CASE("forward passes without backward do not matter", "[ranks][ddp]") {
  const auto gradients = run_ranks<at::Tensor>(2, [](const Rank& self) {
    auto net = make_mlp(1);
    DistributedDataParallel model(net, in(self));
    const auto x = torch::ones({2, 6}) * (self.rank + 1);
    for (int i = 0; i < 3; ++i) model->forward(x);
    model->forward(x).sum().backward();
    return flattened(gradients_of(*net));
  });
  CHECK(torch::equal(gradients[0], gradients[1]));
}

TEST_CASE("ignored parameters keep their own gradients", "[ranks][ddp]") {
  struct Seen {
    at::Tensor weights, bias;
  };
  const auto seen = run_ranks<Seen>(2, [](const Rank& self) {
    torch::nn::Linear net(1, 1);  // the root's own parameters, which Python cannot ignore
    DistributedDataParallel model(net, in(self).parameters_to_ignore({"bias"}));
    model->forward(torch::ones({1, 1})).sum().mul(self.rank + 1).backward();
    return Seen{net->weight.grad().clone(), net->bias.grad().clone()};
  });
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(seen[rank].weights.item<float>() == 1.5);
    CHECK(seen[rank].bias.item<float>() == rank + 1);
  }
}

TEST_CASE("shared parameters are reduced once", "[ranks][ddp]") {
  const auto gradients = run_ranks<float>(2, [](const Rank& self) {
    torch::nn::Linear shared(torch::nn::LinearOptions(1, 1).bias(false));
    torch::nn::Sequential net(shared, shared);
    const torch::NoGradGuard no_grad;
    shared->weight.fill_(3);
    DistributedDataParallel model(net, in(self));
    const torch::AutoGradMode grad(true);
    model->forward(torch::full({1, 1}, self.rank + 1.0)).sum().backward();
    return shared->weight.grad().item<float>();  // d(w*w*x)/dw = 2*w*x
  });
  CHECK(gradients == std::vector<float>{9, 9});
}

TEST_CASE("sparse embeddings are recognised", "[ranks][ddp]") {
  const auto gradients = run_ranks<at::Tensor>(2, [](const Rank& self) {
    torch::nn::Sequential net(
        torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true)),
        torch::nn::Linear(2, 1));
    DistributedDataParallel model(net, in(self));
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model->forward(torch::tensor({self.rank, 3}, at::kLong)).sum().backward();
    }
    const auto gradient = net->parameters()[0].grad();
    TORCH_CHECK(gradient.is_sparse());
    return gradient.to_dense();
  });
  CHECK(torch::equal(gradients[0], gradients[1]));
  CHECK(gradients[0][2].abs().sum().item<float>() == 0);
  CHECK(gradients[0][1].abs().sum().item<float>() > 0);
}

TEST_CASE("a skipped parameter is named by its full name", "[ranks][errors][ddp]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
    DistributedDataParallel model(net, in(self));
    model->forward(torch::ones({1, 2}));
    net[1]->as<torch::nn::Linear>()->forward(torch::ones({1, 2})).sum().backward();
  });
  CHECK_THAT(
      errors, Each(ContainsText(
                  "without gradients for 2 of 4 parameters (0.weight, 0.bias) on every rank")));
}

}  // namespace ddp
