// Combinations of options, compared with gradients that are averaged by hand.
#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

enum class Graph { Whole, Unused, Static };

// The test decides which of its weights a pass uses.
class BranchesImpl : public torch::nn::Module {
 public:
  BranchesImpl() {
    for (const char* name : {"always", "sometimes", "never"}) {
      register_parameter(name, torch::full({3}, 0.5));
    }
  }
  at::Tensor forward(const at::Tensor& x, bool sometimes, bool never) {
    const auto weights = parameters();
    auto y = torch::tanh(x * weights[0]);
    if (sometimes) y = y * weights[1];
    if (never) y = y + weights[2];
    return y.pow(2).sum();
  }
};
TORCH_MODULE(Branches);

struct Combination {
  Graph graph;
  bool as_views, hooked, nested, evaluated;
};

struct Pass {
  double input;
  bool sometimes, never;
};

// The passes of one step: two under no_sync, and the reduced one.
std::vector<Pass> passes_of(const Combination& c, int step, int rank) {
  std::vector<Pass> passes;
  for (int i = 0; i < 3; ++i) {
    const double input = 0.1 * step + 0.2 * i + 0.5 * rank;
    const bool unused = c.graph == Graph::Unused;
    const bool fixed = c.graph == Graph::Static && rank == 1;  // differs by rank, never by step
    passes.push_back(
        {input, unused ? (step + i + rank) % 3 == 0 : !fixed, c.graph == Graph::Whole});
  }
  return passes;
}

void run_passes(
    DistributedDataParallel<Branches>& model, const Combination& c,
    const std::vector<Pass>& passes) {
  const auto forward = [&](const Pass& pass) {
    return model->forward(torch::full({3}, pass.input), pass.sometimes, pass.never);
  };
  {
    const auto guard = model->no_sync();
    forward(passes[0]).backward();
    if (c.evaluated) {
      const torch::NoGradGuard no_grad;
      forward(passes[1]);
    }
    if (c.nested) {
      const auto inner = model->no_sync();
      forward(passes[1]).backward();
    } else {
      forward(passes[1]).backward();
    }
  }
  forward(passes[2]).backward();
}

// The gradients after one step, computed from each rank's own gradients.
std::vector<at::Tensor> average_by_hand(
    std::vector<at::Tensor> local, const std::vector<bool>& used, const Rank& self) {
  for (size_t i = 0; i < local.size(); ++i) {
    auto sum = local[i].defined() ? local[i] / self.size : torch::zeros({3});
    auto users = torch::full({1}, used[i] ? 1.0 : 0.0);
    std::vector<at::Tensor> one{sum}, other{users};
    self.group->allreduce(one)->wait();
    self.group->allreduce(other)->wait();
    if (users.item<double>() > 0) local[i] = sum;
  }
  return local;
}

std::string check(const Combination& c, const Rank& self) {
  Branches net, alone;
  auto options = in(self)
                     .gradient_as_bucket_view(c.as_views)
                     .find_unused_parameters(c.graph == Graph::Unused)
                     .static_graph(c.graph == Graph::Static)
                     .bucket_cap_mb(1e-6);
  DistributedDataParallel model(net, options);
  if (c.hooked) model->register_comm_hook(hooks::all_reduce(self.group));
  std::vector<at::Tensor> expected(3);
  for (int step = 0; step < 5; ++step) {
    const auto passes = passes_of(c, step, self.rank);
    // Every other step accumulates on the gradients of the last one.
    if (step % 2 == 0) {
      for (auto& p : net->parameters()) p.mutable_grad().reset();
      expected.assign(3, {});
    }
    run_passes(model, c, passes);

    const auto weights = alone->parameters();
    std::vector<bool> used(3, false);
    for (size_t i = 0; i < 3; ++i) {
      weights[i].mutable_grad() = expected[i].defined() ? expected[i].clone() : at::Tensor();
    }
    for (const auto& pass : passes) {
      alone->forward(torch::full({3}, pass.input), pass.sometimes, pass.never).backward();
      used[0] = true;
      used[1] = used[1] || pass.sometimes;
      used[2] = used[2] || pass.never;
    }
    std::vector<at::Tensor> local;
    for (const auto& w : weights) local.push_back(w.grad());
    expected = average_by_hand(local, used, self);
    for (size_t i = 0; i < 3; ++i) {
      const auto grad = net->parameters()[i].grad();
      if (grad.defined() != expected[i].defined()) return c10::str("defined: step ", step, " ", i);
      if (grad.defined() && !torch::allclose(grad, expected[i], 1e-6)) {
        return c10::str("step ", step, ", weight ", i, ": ", grad, " instead of ", expected[i]);
      }
    }
  }
  return "";
}

}  // namespace

TEST_CASE(
    "no_sync with any other option averages the accumulated gradients", "[ranks][ddp][long]") {
  const auto seen = run_ranks<std::string>(2, [](const Rank& self) {
    for (const auto graph : {Graph::Whole, Graph::Unused, Graph::Static}) {
      for (int bits = 0; bits < 16; ++bits) {
        const Combination c{
            graph, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
        const auto difference = check(c, self);
        if (!difference.empty()) {
          return c10::str("graph ", static_cast<int>(graph), ", bits ", bits, ": ", difference);
        }
      }
    }
    return std::string();
  });
  CHECK(seen == std::vector<std::string>{"", ""});
}

TEST_CASE("a module can be wrapped again", "[ranks][ddp]") {
  const bool as_views = GENERATE(false, true);
  const auto seen = run_ranks<std::vector<float>>(2, [&](const Rank& self) {
    torch::nn::Linear net(torch::nn::LinearOptions(2, 1).bias(false));
    std::vector<float> gradients;
    for (int life = 0; life < 3; ++life) {
      DistributedDataParallel model(net, in(self).gradient_as_bucket_view(as_views != (life == 1)));
      for (int step = 0; step < 3; ++step) {
        net->zero_grad(/*set_to_none=*/step != 1);
        model->forward(torch::full({1, 2}, self.rank + 1.0)).sum().backward();
        gradients.push_back(net->weight.grad()[0][0].item<float>());
      }
    }
    net->zero_grad();
    net->forward(torch::full({1, 2}, self.rank + 1.0)).sum().backward();  // no wrapper: local
    gradients.push_back(net->weight.grad()[0][0].item<float>());
    return gradients;
  });
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<float> expected(9, 1.5);
    expected.push_back(rank + 1.0f);
    CHECK(seen[rank] == expected);
  }
}

TEST_CASE("bucket_cap_mb_list sets one cap a bucket, from the first pass on", "[ranks][ddp]") {
  using Buckets = std::vector<std::vector<size_t>>;
  struct Seen {
    Buckets first, rebuilt;
    float gradient;
  };
  const auto seen = run_ranks<Seen>(2, [](const Rank& self) {
    torch::nn::Sequential net;
    for (int i = 0; i < 6; ++i) {
      net->push_back(torch::nn::Linear(torch::nn::LinearOptions(16, 16).bias(false)));  // 1 KiB
    }
    const double kib = 1.0 / 1024;
    DistributedDataParallel model(net, in(self).bucket_cap_mb_list({1 * kib, 2 * kib}));
    Seen seen;
    seen.first = model->stats().buckets;
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      model->forward(torch::ones({1, 16}) * (self.rank + 1)).sum().backward();
    }
    seen.rebuilt = model->stats().buckets;
    seen.gradient = net->parameters()[5].grad().sum().item<float>();
    return seen;
  });
  for (const auto& s : seen) {
    CHECK(s.first == Buckets{{5}, {3, 4}, {1, 2}, {0}});  // planned in registration order, reversed
    CHECK(s.rebuilt == Buckets{{5}, {4, 3}, {2, 1}, {0}});  // in the order of gradients
    CHECK(s.gradient == seen[0].gradient);
  }
}

}  // namespace ddp
