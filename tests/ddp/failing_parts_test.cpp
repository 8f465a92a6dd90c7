// A part of the program throws in a backward pass, where no hook of the library has run yet or
// where all gradients are there: the other ranks get to know it.
#include <stdexcept>
#include <string>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::failing_parts {
namespace {

using namespace testing;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Passes its input through, and throws in backward.
class Throwing : public torch::autograd::Function<Throwing> {
 public:
  static at::Tensor forward(AutogradContext* /*context*/, const at::Tensor& t) { return t * 1; }
  static variable_list backward(AutogradContext* /*context*/, const variable_list& /*g*/) {
    throw std::runtime_error("the loss threw");
  }
};

/// Throws at its first step where it is told to.
class Sgd : public torch::optim::SGD {
 public:
  Sgd(const std::vector<at::Tensor>& parameters, bool throws)
      : torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1)), throws_(throws) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    if (throws_) throw std::runtime_error("the optimizer threw");
    return torch::optim::SGD::step(closure);
  }

 private:
  bool throws_;
};

torch::nn::Linear make_net() {
  torch::nn::Linear net(2, 1);
  const torch::NoGradGuard no_grad;
  for (auto& p : net->parameters()) p.fill_(0.5);
  return net;
}

using Model = DistributedDataParallel<torch::nn::Linear>;

void backward_that_throws(Model& model, const std::string& where) {
  auto y = model->forward(torch::ones({1, 2}));
  const auto boom = [](const at::Tensor&) { throw std::runtime_error("the loss threw"); };
  if (where == "the output") {
    y.register_hook(boom);
    return y.backward();
  }
  auto loss = y.square();
  if (where == "a tensor of the loss") loss.register_hook(boom);
  if (where == "a node of the loss") loss = Throwing::apply(loss);
  loss = loss.sum();
  if (where == "the loss") loss.register_hook(boom);
  loss.backward();
}

/// The rank that throws goes on living, and waits until the others have ended.
struct Seen {
  std::string error;
  double seconds = 0;
};

}  // namespace

TEST_CASE(
    "a backward pass that throws before its first gradient stops the other ranks",
    "[ranks][errors][failure][many]") {
  const std::string where =
      GENERATE("the output", "a tensor of the loss", "a node of the loss", "the loss");
  const auto reduction = GENERATE(Reduction::Mean, Reduction::SampleWeighted);
  const int before = GENERATE(0, 3);
  CAPTURE(where, before);
  const auto seen = run_ranks<Seen>(3, kLongTimeout, [&](const Rank& self) {
    Model model(make_net(), in(self).reduction(reduction));
    const auto step = [&] { model->forward(torch::ones({1, 2})).sum().backward(); };
    for (int i = 0; i < before; ++i) step();
    const auto timed =
        timed_error_of([&] { self.rank == 1 ? backward_that_throws(model, where) : step(); });
    if (self.rank == 1) self.wait_until_others_end();
    return Seen{timed.error, timed.seconds};
  });
  CHECK_THAT(seen[1].error, Catch::Contains("the loss threw"));
  for (const int rank : {0, 2}) {
    CHECK_THAT(
        seen[rank].error,
        Catch::Contains("backward threw on rank 1 of 3, ") && Catch::Contains("the loss threw"));
    CHECK(seen[rank].seconds < 20);
  }
}

TEST_CASE("ranks that all catch what their losses throw go on", "[ranks][failure]") {
  const auto seen = run_ranks<float>(2, [](const Rank& self) {
    Model model(make_net(), in(self));
    float gradient = 0;
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      try {
        backward_that_throws(model, "a node of the loss");
      } catch (const std::runtime_error&) {
      }
      // Its backward pass is of the batch alone, whatever was thrown before.
      model->forward(torch::full({1, 2}, self.rank + 1.0)).sum().backward();
      gradient = model->module()->weight.grad()[0][0].item<float>();
    }
    return gradient;
  });
  for (const float gradient : seen) CHECK(gradient == 1.5);
}

TEST_CASE(
    "torch::autograd::grad that throws on one rank is no matter of the others",
    "[ranks][failure]") {
  const auto seen = run_ranks<float>(2, [](const Rank& self) {
    Model model(make_net(), in(self));
    const auto x = torch::ones({1, 2}).set_requires_grad(true);
    const auto loss = model->forward(x).sum();
    if (self.rank == 1) {
      try {
        torch::autograd::grad({Throwing::apply(loss)}, {x}, {}, /*retain_graph=*/true);
      } catch (const std::runtime_error&) {
      }
    }
    loss.backward();
    return model->module()->weight.grad()[0][0].item<float>();
  });
  for (const float gradient : seen) CHECK(gradient == 1);
}

TEST_CASE(
    "an optimizer that throws in the backward pass stops the other ranks",
    "[ranks][errors][failure][step]") {
  const auto seen = run_ranks<Seen>(2, kLongTimeout, [](const Rank& self) {
    const auto net = make_net();
    Model model(net, in(self));
    model->step_in_backward(std::make_shared<Sgd>(net->parameters(), self.rank == 1));
    const auto timed = timed_error_of([&] {
      for (int step = 0; step < 2; ++step) {
        model->zero_grad();
        model->forward(torch::ones({1, 2})).sum().backward();
      }
    });
    if (self.rank == 1) self.wait_until_others_end();
    return Seen{timed.error, timed.seconds};
  });
  CHECK(seen[1].error == "the optimizer threw");
  CHECK_THAT(
      seen[0].error, Catch::Contains("a step in the backward pass threw on rank 1 of 2, whose "
                                     "model is no longer the others': the optimizer threw"));
  CHECK(seen[0].seconds < 20);
}

TEST_CASE(
    "a data set that throws something else on one rank is an error on all", "[ranks][errors]") {
  struct Data {
    std::optional<size_t> size() const { return 4; }
    torch::data::Example<> get(size_t i) const {
      if (throws) throw 7;
      return {torch::full({1}, static_cast<double>(i)), torch::zeros({1})};
    }
    std::vector<torch::data::Example<>> get_batch(const std::vector<size_t>& indices) const {
      std::vector<torch::data::Example<>> batch;
      for (const auto i : indices) batch.push_back(get(i));
      return batch;
    }
    bool throws;
  };
  const auto seen = run_ranks<std::string>(2, [](const Rank& self) {
    DistributedSampler sampler(
        4, DistributedSamplerOptions().num_replicas(self.size).rank(self.rank));
    Data data{self.rank == 1};
    const auto error = error_of([&] { sampler.check_dataset(data, 16, self.group); });
    auto sum = torch::ones({1});
    all_reduce(sum, c10d::ReduceOp::SUM, self.group);  // the ranks' messages are in step
    return error + std::to_string(sum.item<int>());
  });
  CHECK_THAT(
      seen,
      Each(Catch::Contains("an exception that is no std::exception") && Catch::EndsWith("2")));
}

}  // namespace ddp::failing_parts
