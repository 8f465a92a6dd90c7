// Other uses of autograd in a program with a wrapper.
#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

using Gradients = std::vector<float>;

float first_gradient(const torch::nn::Linear& net) {
  return net->weight.grad()[0][0].item<float>();
}

// y = x * w, with w's gradient computed in a backward pass of its own, as reentrant checkpointing
// does: forward keeps nothing, and backward runs forward again.
class Checkpointed : public torch::autograd::Function<Checkpointed> {
 public:
  using Run = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(
      torch::autograd::AutogradContext* context, const at::Tensor& x, const Run& run) {
    context->save_for_backward({x});
    runs[context] = run;
    const torch::NoGradGuard no_grad;
    return run(x);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    const auto x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    at::Tensor y;
    {
      const torch::AutoGradMode with_grad(true);
      y = runs[context](x);
    }
    y.backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
  // The forward function of each context, which cannot save it; one map for each rank's thread.
  static thread_local std::map<torch::autograd::AutogradContext*, Run> runs;
};
thread_local std::map<torch::autograd::AutogradContext*, Checkpointed::Run> Checkpointed::runs;

}  // namespace

TEST_CASE("autograd::grad for a gradient penalty counts as no backward pass", "[ranks][ddp]") {
  const int mode = GENERATE(0, 1, 2);
  CAPTURE(mode);
  const auto seen = run_ranks<Gradients>(2, [&](const Rank& self) {
    auto net = make_linear(2);
    DistributedDataParallel model(
        net, in(self).find_unused_parameters(mode == 1).static_graph(mode == 2));
    Gradients gradients;
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const auto x = torch::full({1, 2}, self.rank + 1.0).set_requires_grad(true);
      const auto y = model->forward(x).pow(2).sum();
      // dy/dx = 2 w (w . x), whose norm is added to the loss.
      const auto slope = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
      if (net->weight.grad().defined()) gradients.push_back(-1);
      (y + slope.sum()).backward();
      gradients.push_back(first_gradient(net));
    }
    return gradients;
  });
  // w = (1, 1), x = r (1, 1): y = (2 r)^2, d/dw0 = 4 r * r; the slopes add up to 8 r, d/dw0 = 8 r.
  const float expected = (4 + 8 + 16 + 16) / 2.0f;
  for (const auto& gradients : seen) CHECK(gradients == Gradients(3, expected));
}

TEST_CASE("a gradient penalty may have a backward pass of its own", "[ranks][ddp]") {
  const std::string order = GENERATE("penalty first", "penalty last", "penalty between");
  const bool find_unused = GENERATE(true, false);
  CAPTURE(order, find_unused);
  std::vector<Gradients> seen(2);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel model(net, in(self).find_unused_parameters(find_unused));
    const auto run = [&] { return model->forward(torch::full({1, 2}, self.rank + 1.0)).sum(); };
    const auto penalize = [&] {
      const auto x = torch::ones({1, 2}).set_requires_grad(true);
      const auto slope = torch::autograd::grad({model->forward(x).sum()}, {x}, {}, true, true)[0];
      ((self.rank + 1) * slope.sum()).backward();
    };
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      if (order == "penalty first") penalize();
      const auto loss = run();
      if (order == "penalty between") penalize();
      loss.backward();
      if (order == "penalty last") penalize();
      seen[self.rank].push_back(first_gradient(net));
      seen[self.rank].push_back(net->bias.grad().item<float>());
    }
  });
  if (find_unused) {
    // The loss and the penalty each give the weight r + 1; the penalty gives the bias nothing.
    CHECK(errors == std::vector<std::string>(2));
    for (const auto& gradients : seen) CHECK(gradients == Gradients{3, 1, 3, 1, 3, 1});
  } else {
    CHECK_THAT(errors, Each(ContainsText("without gradients for 1 of 2 parameters (bias")));
  }
}

TEST_CASE("backward with inputs is averaged, every time", "[ranks][ddp]") {
  const auto seen = run_ranks<Gradients>(2, [](const Rank& self) {
    auto net = make_linear(2);
    DistributedDataParallel model(net, in(self));
    Gradients gradients;
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      const auto loss = model->forward(torch::full({1, 2}, self.rank + 1.0)).sum();
      for (const bool again : {true, false}) {
        loss.backward({}, /*retain_graph=*/again, false, std::vector<at::Tensor>{net->weight});
        gradients.push_back(first_gradient(net));
      }
    }
    return gradients;
  });
  for (const auto& gradients : seen) CHECK(gradients == Gradients{1.5, 3, 1.5, 3});
}

TEST_CASE("an old wrapper of the same module does not disturb a new one", "[ranks][ddp]") {
  const auto seen = run_ranks<Gradients>(2, [](const Rank& self) {
    torch::nn::Sequential net(make_linear(2), make_linear(1));
    const auto last = std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->ptr(1));
    const auto pass = [&](auto& model) {
      net->zero_grad();
      model->forward(torch::full({1, 2}, self.rank + 1.0)).sum().backward();
    };
    DistributedDataParallel old(net, in(self));
    for (int step = 0; step < 2; ++step) pass(old);
    last->weight.set_requires_grad(false);
    DistributedDataParallel model(net, in(self));  // as the error about frozen parameters advises
    Gradients gradients;
    for (int step = 0; step < 2; ++step) {
      pass(model);
      gradients.push_back(net->parameters()[0].grad()[0][0].item<float>());
    }
    return gradients;
  });
  for (const auto& gradients : seen) CHECK(gradients == Gradients{1.5, 1.5});
}

TEST_CASE("a backward pass of the bare module is not averaged", "[ranks][ddp]") {
  const auto seen = run_ranks<Gradients>(2, [](const Rank& self) {
    auto net = make_linear(2);
    DistributedDataParallel model(net, in(self));
    Gradients gradients;
    const auto x = torch::full({1, 2}, self.rank + 1.0);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model->forward(x).sum().backward();
      gradients.push_back(first_gradient(net));
      if (self.rank == 0) {
        net->zero_grad();
        net->forward(x * 10).sum().backward();
        if (first_gradient(net) != 10) gradients.push_back(-1);
      }
    }
    return gradients;
  });
  for (const auto& gradients : seen) CHECK(gradients == Gradients{1.5, 1.5, 1.5});
}

TEST_CASE("a forward inside a backward pass is averaged with it", "[ranks][ddp]") {
  const bool find_unused = GENERATE(false, true);
  const auto seen = run_ranks<Gradients>(2, [&](const Rank& self) {
    auto net = make_linear(2);
    DistributedDataParallel model(net, in(self).find_unused_parameters(find_unused));
    Gradients gradients;
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const auto x = torch::full({1, 2}, self.rank + 1.0).set_requires_grad(true);
      const auto run = [&](const at::Tensor& input) { return model->forward(input); };
      Checkpointed::apply(x, run).sum().backward();
      gradients.push_back(first_gradient(net));
    }
    return gradients;
  });
  for (const auto& gradients : seen) CHECK(gradients == Gradients{1.5, 1.5, 1.5});
}

TEST_CASE("a forward inside a backward pass works beside a plain one", "[ranks][ddp]") {
  const auto seen = run_ranks<Gradients>(2, [](const Rank& self) {
    auto net = make_linear(2);
    DistributedDataParallel model(net, in(self).static_graph(true));
    Gradients gradients;
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      const auto x = torch::full({1, 2}, self.rank + 1.0).set_requires_grad(true);
      const auto run = [&](const at::Tensor& input) { return model->forward(input); };
      const auto checkpointed = Checkpointed::apply(x, run).sum();
      // The later of the two runs backward first: a reduced pass has begun when the other one runs
      // forward again.
      (checkpointed + model->forward(x).sum()).backward();
      gradients.push_back(first_gradient(net));
    }
    return gradients;
  });
  for (const auto& gradients : seen) CHECK(gradients == Gradients{3, 3, 3, 3});
}

TEST_CASE("a checkpoint inside a wrapped module is averaged", "[ranks][ddp]") {
  class CheckpointedModule : public torch::nn::Module {
   public:
    CheckpointedModule() {
      inner = register_module("inner", make_linear(2));
      scale = register_parameter("scale", torch::ones({1}));
    }
    at::Tensor forward(const at::Tensor& x) {
      return Checkpointed::apply(x, Checkpointed::Run([this](const at::Tensor& input) {
                                   return inner->forward(input);
                                 })) *
             scale;
    }
    torch::nn::Linear inner{nullptr};
    at::Tensor scale;
  };
  const auto seen = run_ranks<Gradients>(2, [](const Rank& self) {
    const auto net = std::make_shared<CheckpointedModule>();
    DistributedDataParallel model(net, in(self));
    Gradients gradients;
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const auto x = torch::full({1, 2}, self.rank + 1.0).set_requires_grad(true);
      model->forward(x).sum().backward();
      gradients.push_back(first_gradient(net->inner));
      gradients.push_back(net->scale.grad().item<float>());
    }
    return gradients;
  });
  for (const auto& gradients : seen) CHECK(gradients == Gradients{1.5, 3, 1.5, 3, 1.5, 3});
}

TEST_CASE("a backward pass is local when its wrapper was destroyed before", "[ranks][ddp]") {
  const auto seen = run_ranks<Gradients>(2, [](const Rank& self) {
    auto net = make_linear(2);
    at::Tensor loss;
    {
      DistributedDataParallel model(net, in(self));
      loss = model->forward(torch::full({1, 2}, self.rank + 1.0)).sum();
    }
    loss.backward();
    return Gradients{first_gradient(net)};
  });
  CHECK(seen == std::vector<Gradients>{{1}, {2}});
}

TEST_CASE("two wrappers share a loss", "[ranks][ddp]") {
  const bool as_views = GENERATE(false, true);
  const auto seen = run_ranks<Gradients>(2, [&](const Rank& self) {
    auto encoder = make_linear(2), decoder = make_linear(1);
    DistributedDataParallel first(encoder, in(self).gradient_as_bucket_view(as_views));
    DistributedDataParallel second(decoder, in(self));
    Gradients gradients;
    for (int step = 0; step < 3; ++step) {
      encoder->zero_grad();
      decoder->zero_grad();
      second->forward(first->forward(torch::full({1, 2}, self.rank + 1.0))).sum().backward();
      gradients.push_back(first_gradient(encoder));
      gradients.push_back(first_gradient(decoder));
    }
    return gradients;
  });
  for (const auto& gradients : seen) CHECK(gradients == Gradients{1.5, 3, 1.5, 3, 1.5, 3});
}

TEST_CASE("create_graph averages first derivatives and keeps their graph", "[ranks][ddp]") {
  const bool as_views = GENERATE(false, true);
  const auto seen = run_ranks<Gradients>(2, [&](const Rank& self) {
    auto net = make_linear(1);
    DistributedDataParallel model(net, in(self).gradient_as_bucket_view(as_views));
    Gradients gradients;
    for (int step = 0; step < 3; ++step) {
      net->weight.mutable_grad().reset();
      const auto loss = model->forward(torch::full({1, 1}, self.rank + 1.0)).pow(2).sum();
      loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      const auto gradient = net->weight.grad();
      gradients.push_back(gradient.item<float>());  // 2 x^2: 2 and 8
      if (!gradient.requires_grad()) gradients.push_back(-1);
      // The second derivative is this rank's own: 2 x^2.
      const auto second = torch::autograd::grad({gradient}, {net->weight})[0].item<float>();
      gradients.push_back(second / ((self.rank + 1) * (self.rank + 1)));
      net->weight.mutable_grad().reset();  // breaks the cycle of gradient and graph
    }
    return gradients;
  });
  for (const auto& gradients : seen) CHECK(gradients == Gradients{5, 2, 5, 2, 5, 2});
}

}  // namespace ddp
