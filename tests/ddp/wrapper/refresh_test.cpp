// Modules that change after they were wrapped: parameters are added, removed, frozen and unfrozen.
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/ranks.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

torch::nn::Linear line() { return torch::nn::Linear(torch::nn::LinearOptions(2, 2)); }

// A body, and heads that are added later.
class GrowingImpl : public torch::nn::Module {
 public:
  GrowingImpl() { body = register_module("body", line()); }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = body->forward(x).tanh();
    auto sum = y.sum();
    for (auto& head : heads) sum = sum + head->forward(y).square().sum();
    return sum;
  }
  void add_head(const std::string& name) { heads.push_back(register_module(name, line())); }
  void replace_body() { body = replace_module("body", line()); }
  torch::nn::Linear body{nullptr};
  std::vector<torch::nn::Linear> heads;
};
TORCH_MODULE(Growing);

// Sets different values on each rank, which only the wrapper makes equal.
void fill(const torch::nn::Module& module, int rank) {
  const torch::NoGradGuard no_grad;
  double start = 0.1 + rank;
  for (auto& p : module.parameters()) {
    p.copy_(torch::linspace(start, -start, p.numel(), p.options()).view_as(p));
    start += 0.2;
  }
}

at::Tensor batch(int rank, int step) {
  return torch::tensor({{0.5, -1.0}, {1.0, 0.25}}, at::kDouble) * (1 + rank + 0.5 * step);
}

// Whether the gradients equal those of one process with all ranks' batches.
bool averaged_as_one(Growing& net, int ranks, int step) {
  std::vector<at::Tensor> trained;
  for (const auto& p : net->parameters()) {
    if (p.requires_grad()) trained.push_back(p);
  }
  at::Tensor loss = torch::zeros({}, at::kDouble);
  for (int rank = 0; rank < ranks; ++rank) loss = loss + net->forward(batch(rank, step)) / ranks;
  // torch::autograd::grad() does not accumulate.
  const auto expected = torch::autograd::grad({loss}, trained);
  for (size_t i = 0; i < trained.size(); ++i) {
    const auto& grad = trained[i].grad();
    if (!grad.defined() || !torch::allclose(grad, expected[i], 0, 1e-12)) return false;
  }
  return true;
}

// Changes shapes in place, as densification and growing vocabularies do, so that all holders of the
// parameters see it.
void reshape(Growing& net, int64_t width) {
  const torch::NoGradGuard no_grad;
  const auto reshape_to = [](const at::Tensor& p, at::IntArrayRef sizes) {
    p.set_data(torch::zeros(sizes, p.options()));
  };
  reshape_to(net->body->weight, {width, 2});
  reshape_to(net->body->bias, {width});
  reshape_to(net->heads[0]->weight, {2, width});
}

template <typename Model>
void step_with(Model& model, const Rank& self, int step) {
  model->zero_grad();
  model->forward(batch(self.rank, step)).backward();
}

}  // namespace

TEST_CASE("a parameter registered after wrapping is warned of once, by name", "[ranks][ddp]") {
  const auto seen = run_ranks<std::vector<int>>(2, [](const Rank& self) {
    Growing net;
    net->to(at::kDouble);
    DistributedDataParallel model(net, in(self));
    const Warnings warnings;
    step_with(model, self, 0);
    const int before = warnings.count("more on rank");
    net->add_head("classes");
    net->to(at::kDouble);
    std::vector<int> counts{before};
    for (int step = 1; step < 3; ++step) {
      step_with(model, self, step);
      counts.push_back(warnings.count(
          "got 2 more on rank " + std::to_string(self.rank) +
          " of 2 (classes.weight, classes.bias), whose gradients are not averaged. Call "
          "model->refresh() on every rank"));
    }
    net->add_head("ignored");
    return counts;
  });
  for (const auto& counts : seen) CHECK(counts == std::vector<int>{0, 1, 1});
}

TEST_CASE("tied, frozen and ignored parameters are not warned of", "[ranks][ddp]") {
  const auto counts = run_ranks<size_t>(1, [](const Rank& self) {
    Growing net;
    DistributedDataParallel model(net, in(self).parameters_to_ignore({"body.bias"}));
    const Warnings warnings;
    net->register_parameter("tied", net->body->weight);
    net->register_parameter("frozen", torch::ones({2}), /*requires_grad=*/false);
    model->forward(torch::ones({1, 2})).backward();
    return warnings.texts.size();
  });
  CHECK(counts[0] == 0);
}

TEST_CASE("refresh updates the wrapper after any change of parameters", "[ranks][ddp][long]") {
  const std::string change =
      GENERATE("added", "replaced", "frozen", "thawed", "to double", "grown", "shrunk", "nothing");
  const std::string mode = GENERATE("plain", "views", "static_graph", "find_unused");
  CAPTURE(change, mode);
  const auto results = run_ranks<std::vector<int>>(2, [&](const Rank& self) {
    Growing net;
    net->add_head("first");
    const bool moves = change == "to double";
    if (!moves) net->to(at::kDouble);
    fill(*net, 0);
    if (change == "thawed") net->body->weight.set_requires_grad(false);
    DistributedDataParallel model(
        net, in(self)
                 .bucket_cap_mb(1e-5)
                 .gradient_as_bucket_view(mode == "views")
                 .static_graph(mode == "static_graph")
                 .find_unused_parameters(mode == "find_unused"));
    if (!moves) step_with(model, self, 0);
    // Keeps the parameters' gradient accumulators alive.
    const auto graph = moves ? at::Tensor() : model->forward(batch(self.rank, 0));
    if (change == "grown") reshape(net, 3);
    if (change == "shrunk") reshape(net, 1);
    if (change == "grown" || change == "shrunk") fill(*net, self.rank);
    if (change == "added") net->add_head("second");
    if (change == "replaced") net->replace_body();
    if (change == "frozen") net->body->weight.set_requires_grad(false);
    if (change == "thawed") net->body->weight.set_requires_grad(true);
    net->to(at::kDouble);
    if (change == "added" || change == "replaced") fill(*net, self.rank);
    model->refresh();
    std::vector<int> right;
    for (int step = 1; step < 4; ++step) {
      step_with(model, self, step);
      right.push_back(averaged_as_one(net, self.size, step));
    }
    // Every rank has rank 0's values.
    const auto weight = net->body->weight.detach().flatten()[0].item<double>();
    if (change == "replaced") right.push_back(weight == 0.1);
    return right;
  });
  for (const auto& right : results) {
    for (const int is_right : right) CHECK(is_right == 1);
  }
}

TEST_CASE(
    "refresh accepts data of another shape, and drops gradients that do not fit", "[ranks][ddp]") {
  const std::string change = GENERATE("dtype", "as many elements", "dimensions");
  CAPTURE(change);
  const auto results = run_ranks<std::vector<int>>(2, [&](const Rank& self) {
    Growing net;
    net->add_head("first");
    if (change != "dtype") net->to(at::kDouble);
    DistributedDataParallel model(net, in(self));
    for (auto& p : net->parameters()) p.mutable_grad() = torch::ones_like(p);
    if (change == "dtype") {
      for (auto& p : net->parameters()) p.set_data(p.to(at::kDouble));
    } else {
      const bool turned = change == "as many elements";
      net->body->weight.set_data(torch::zeros({4, 2}, at::kDouble));
      net->body->bias.set_data(torch::zeros({4}, at::kDouble));
      net->heads[0]->weight.set_data(torch::zeros({turned ? 1 : 2, 4}, at::kDouble));
      net->heads[0]->bias.set_data(
          turned ? torch::zeros({1}, at::kDouble) : torch::zeros({}, at::kDouble));
    }
    fill(*net, self.rank);
    model->refresh();
    std::vector<int> right{!net->body->weight.grad().defined()};
    for (int step = 0; step < 3; ++step) {
      step_with(model, self, step);
      right.push_back(averaged_as_one(net, self.size, step));
    }
    return right;
  });
  for (const auto& right : results) CHECK(right == std::vector<int>{1, 1, 1, 1});
}

TEST_CASE("a shape that changed without refresh throws until refresh", "[ranks][ddp]") {
  const auto seen = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    Growing net;
    net->add_head("first");
    net->to(at::kDouble);
    fill(*net, 0);
    DistributedDataParallel model(net, in(self));
    step_with(model, self, 0);
    reshape(net, 3);
    const auto error = error_of([&] { step_with(model, self, 1); });
    fill(*net, self.rank);
    model->refresh();
    step_with(model, self, 2);
    return std::vector<std::string>{error, averaged_as_one(net, 2, 2) ? "averaged" : "not"};
  });
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_THAT(
        seen[rank][0],
        ContainsText(
            "expected parameters of the shapes that they had when the module was wrapped, "
            "got \"body.weight\" of [3, 2] on rank " +
            std::to_string(rank) + " of 2. Call model->refresh() on every rank"));
    CHECK(seen[rank][1] == "averaged");
  }
}

TEST_CASE("refresh keeps the communication hook and the optimizer", "[ranks][ddp]") {
  const auto seen = run_ranks<std::vector<int>>(2, [](const Rank& self) {
    Growing net;
    net->to(at::kDouble);
    fill(*net, 0);
    DistributedDataParallel model(net, in(self));
    int calls = 0;
    const auto all_reduce = hooks::all_reduce(self.group);
    model->register_comm_hook([&](GradBucket& bucket) {
      ++calls;
      return all_reduce(bucket);
    });
    const auto optimizer = std::make_shared<torch::optim::SGD>(net->parameters(), 0.1);
    model->step_in_backward(optimizer);
    step_with(model, self, 0);
    net->add_head("second");
    net->to(at::kDouble);
    fill(*net, 0);
    optimizer->param_groups()[0].params() = net->parameters();
    model->refresh();
    const int before = calls;
    const auto old = net->heads[0]->weight.detach().clone();
    step_with(model, self, 1);
    const bool stepped =
        torch::allclose(net->heads[0]->weight, old - 0.1 * net->heads[0]->weight.grad(), 0, 1e-12);
    return std::vector<int>{calls > before, stepped};
  });
  for (const auto& result : seen) CHECK(result == std::vector<int>{1, 1});
}

TEST_CASE(
    "refresh throws for models that differ, and the old model can be trained",
    "[ranks][ddp][errors]") {
  const auto seen = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    Growing net;
    net->to(at::kDouble);
    DistributedDataParallel model(net, in(self));
    step_with(model, self, 0);
    if (self.rank == 1) net->body->weight.set_requires_grad(false);
    const auto error = error_of([&] { model->refresh(); });
    net->body->weight.set_requires_grad(true);
    step_with(model, self, 1);
    return std::vector<std::string>{error, averaged_as_one(net, 2, 1) ? "averaged" : "not"};
  });
  CHECK(seen[0] == seen[1]);
  CHECK_THAT(
      seen[0][0], ContainsText("expected every rank to wrap the same model, but "
                               "parameter \"body.weight\" is"));
  CHECK(seen[0][1] == "averaged");
}

TEST_CASE("refresh throws inside a join and a backward pass", "[ranks][ddp][errors]") {
  const auto seen = run_ranks<std::vector<std::string>>(1, [](const Rank& self) {
    Growing net;
    DistributedDataParallel model(net, in(self));
    std::vector<std::string> errors;
    model->join([&] { errors.push_back(error_of([&] { model->refresh(); })); });
    auto loss = model->forward(torch::ones({1, 2}));
    loss.register_hook(
        [&](const at::Tensor&) { errors.push_back(error_of([&] { model->refresh(); })); });
    loss.backward();
    return errors;
  });
  REQUIRE(seen[0].size() == 2);
  CHECK_THAT(seen[0][0], ContainsText("between two steps, got a call in join() on rank 0 of 1"));
  CHECK_THAT(
      seen[0][1], ContainsText("between two steps, got a call in a backward pass on rank 0"));
}

TEST_CASE("a forward with all parameters frozen works and is not averaged", "[ranks][ddp]") {
  const std::string mode = GENERATE("plain", "views", "static_graph", "find_unused", "weighted");
  CAPTURE(mode);
  const auto results = run_ranks<std::vector<int>>(2, [&](const Rank& self) {
    Growing judge;
    judge->to(at::kDouble);
    fill(*judge, 0);
    const auto options =
        in(self)
            .bucket_cap_mb(1e-5)
            .gradient_as_bucket_view(mode == "views")
            .static_graph(mode == "static_graph")
            .find_unused_parameters(mode == "find_unused")
            .reduction(mode == "weighted" ? Reduction::SampleWeighted : Reduction::Mean);
    DistributedDataParallel wrapped(judge, options);
    std::vector<int> right;
    for (int step = 0; step < 4; ++step) {
      step_with(wrapped, self, step);
      right.push_back(averaged_as_one(judge, 2, step));
      const auto before = gradients_of(*judge);
      for (auto& p : judge->parameters()) p.set_requires_grad(false);
      // On one rank only: the other does not wait.
      if (self.rank == 0) {
        auto x = batch(0, 0).set_requires_grad(true);
        wrapped->forward(x).backward();
        right.push_back(x.grad().abs().sum().item<double>() > 0);
      }
      for (auto& p : judge->parameters()) p.set_requires_grad(true);
      right.push_back(all_equal(before, gradients_of(*judge)));
    }
    return right;
  });
  for (const auto& right : results) {
    for (const int is_right : right) CHECK(is_right == 1);
  }
}

TEST_CASE("frozen weights with unfrozen others are an error, not a local pass", "[ranks][ddp]") {
  const auto error = error_of_all(2, [](const Rank& self) {
    Growing net;
    net->to(at::kDouble);
    net->body->bias.set_requires_grad(false);
    DistributedDataParallel model(net, in(self));
    net->body->weight.set_requires_grad(false);
    net->body->bias.set_requires_grad(true);
    step_with(model, self, 0);
  });
  CHECK_THAT(
      error, ContainsText("gradients are not averaged for 1 parameter (body.bias: required no "
                          "gradient when the module was wrapped) on every rank. Call "
                          "model->refresh() on every rank."));
}

TEST_CASE("steps on gradients of the bare module are warned of once", "[ranks][ddp]") {
  const std::string optimizer = GENERATE("sgd", "adam");
  const bool trained_before = GENERATE(false, true);
  const auto counts = run_ranks<std::vector<int>>(2, [&](const Rank& self) {
    Growing net;
    net->to(at::kDouble);
    DistributedDataParallel model(net, in(self));
    torch::optim::SGD sgd(net->parameters(), 0.1);
    torch::optim::Adam adam(net->parameters());
    const Warnings warnings;
    if (trained_before) step_with(model, self, 0);
    std::vector<int> counts;
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      model->module()->forward(batch(self.rank, step)).backward();
      optimizer == "sgd" ? sgd.step() : adam.step();
      counts.push_back(warnings.count("got an optimizer step on those of others"));
    }
    return counts;
  });
  for (const auto& of_rank : counts) CHECK(of_rank == std::vector<int>{0, 1, 1, 1});
}

TEST_CASE("a step on averaged gradients plus local ones is warned of once", "[ranks][ddp]") {
  const auto counts = run_ranks<std::vector<int>>(2, [](const Rank& self) {
    Growing net;
    net->to(at::kDouble);
    DistributedDataParallel model(net, in(self));
    torch::optim::SGD sgd(net->parameters(), 0.1);
    const Warnings warnings;
    std::vector<int> counts;
    for (int step = 0; step < 4; ++step) {
      step_with(model, self, step);
      counts.push_back(warnings.count("got an optimizer step on those of others"));
      model->module()->forward(batch(self.rank, step)).backward();
      sgd.step();
    }
    return counts;
  });
  for (const auto& of_rank : counts) CHECK(of_rank == std::vector<int>{0, 1, 1, 1});
}

TEST_CASE("gradients that only pass through a bare module are not warned of", "[ranks][ddp]") {
  const auto counts = run_ranks<size_t>(2, [](const Rank& self) {
    Growing net;
    net->to(at::kDouble);
    DistributedDataParallel model(net, in(self));
    torch::optim::Adam adam(net->parameters());
    const Warnings warnings;
    for (int step = 0; step < 4; ++step) {
      // Two losses through the bare module, as in the generator's step of a GAN.
      for (int pass = 0; pass < 2; ++pass) {
        model->module()->forward(batch(self.rank, step)).backward();
        const torch::NoGradGuard no_grad;
        for (auto& p : model->parameters()) p.clamp_(-100, 100);  // changes nothing
      }
      step_with(model, self, step);
      adam.step();
    }
    const auto guard = model->no_sync();
    for (int step = 0; step < 4; ++step) {
      model->forward(batch(self.rank, step)).backward();
      adam.step();
    }
    return warnings.texts.size();
  });
  CHECK(counts == std::vector<size_t>{0, 0});
}

}  // namespace ddp
