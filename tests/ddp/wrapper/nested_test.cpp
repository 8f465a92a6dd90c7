// Wrappers inside wrappers, options of later versions of Python's wrapper: whose buffers
// construction shares, and buckets that have memory only while they are under way.
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/live_bytes.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

at::Tensor nested_wave(at::IntArrayRef sizes, double phase) {
  return (torch::arange(c10::multiply_integers(sizes), torch::kDouble) * 0.7 + phase)
      .sin()
      .view(sizes);
}

const Waves kWaves{0.7};

/// A part that has a wrapper of its own.
struct InnerImpl : torch::nn::Module {
  InnerImpl() : linear(register_module("linear", torch::nn::Linear(4, 4))) {
    to(torch::kDouble);
    set_waves(*this, kWaves);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Inner);

struct OuterImpl : torch::nn::Module {
  explicit OuterImpl(const DistributedDataParallelOptions& options)
      : first(register_module("first", torch::nn::Linear(3, 4))),
        wrapped(Inner(), options),
        last(register_module("last", torch::nn::Linear(4, 2))) {
    first->to(torch::kDouble);
    last->to(torch::kDouble);
    set_waves(*first, kWaves);
    set_waves(*last, kWaves);
    register_module("inner", wrapped.ptr());
  }
  at::Tensor forward(const at::Tensor& x) { return last(wrapped->forward(first(x))); }
  torch::nn::Linear first{nullptr};
  DistributedDataParallel<Inner> wrapped;
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Outer);

/// The same without wrappers, of all ranks' rows.
std::vector<at::Tensor> train_nested_alone(int ranks, int steps) {
  torch::nn::Sequential net(torch::nn::Linear(3, 4), Inner(), torch::nn::Linear(4, 2));
  net->to(torch::kDouble);
  set_waves(*net[0], kWaves);
  set_waves(*net[2], kWaves);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < steps; ++step) {
    std::vector<at::Tensor> rows;
    for (int rank = 0; rank < ranks; ++rank) rows.push_back(nested_wave({5, 3}, 10 * rank + step));
    optimizer.zero_grad();
    net->forward(torch::cat(rows)).square().mean().backward();
    optimizer.step();
  }
  return net->parameters();
}

/// A model with activations that are large beside its parameters' gradients.
torch::nn::Sequential make_wide_net() {
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(128, 128).bias(false)));
    net->push_back(torch::nn::Tanh());
  }
  set_waves(*net, kWaves);
  return net;
}

}  // namespace

TEST_CASE("a wrapper inside a wrapper trains as one process", "[ranks][ddp][nested]") {
  constexpr int kRanks = 2, kSteps = 4;
  // Ignored by the outer one, as Python's users of nested wrappers do, or averaged by both.
  const bool ignores = GENERATE(true, false);
  const bool as_views = GENERATE(false, true);
  const bool finds_unused = GENERATE(false, true);
  CAPTURE(ignores, as_views, finds_unused);
  if (as_views && !ignores) return;  // an error, below
  const auto expected = train_nested_alone(kRanks, kSteps);
  const auto results = run_ranks<std::vector<at::Tensor>>(kRanks, [&](const Rank& self) {
    auto options = in(self).gradient_as_bucket_view(as_views).find_unused_parameters(finds_unused);
    Outer outer(options);
    const std::vector<std::string> inner{"inner.module.linear.weight", "inner.module.linear.bias"};
    if (ignores) options.parameters_to_ignore(inner);
    DistributedDataParallel model(outer, options);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      model->forward(nested_wave({5, 3}, 10 * self.rank + step)).square().mean().backward();
      optimizer.step();
    }
    return std::vector<at::Tensor>{
        outer->first->weight,
        outer->first->bias,
        outer->wrapped->module()->linear->weight,
        outer->wrapped->module()->linear->bias,
        outer->last->weight,
        outer->last->bias};
  });
  for (const auto& values : results) CHECK(all_close(values, expected, 1e-12, 1e-12));
}

TEST_CASE("two wrappers of a parameter have no views of buckets", "[ranks][ddp][nested][errors]") {
  const bool inner_views = GENERATE(true, false);
  CAPTURE(inner_views);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Outer outer(in(self).gradient_as_bucket_view(inner_views));
    DistributedDataParallel model(outer, in(self).gradient_as_bucket_view(!inner_views));
  });
  for (const auto& error : errors) {
    CHECK_THAT(
        error, ContainsText("gradient_as_bucket_view: expected parameters that one wrapper "
                            "averages, got \"inner.module.linear.weight\""));
  }
}

TEST_CASE("forward_sync_buffers(false) shares buffers at construction", "[ranks][ddp]") {
  struct Case {
    std::optional<bool> forward_sync;
    bool broadcast;
    bool at_construction, in_passes;
  };
  const auto c = GENERATE(
      Case{{}, true, true, true}, Case{{}, false, false, false}, Case{false, true, true, false},
      Case{false, false, true, false}, Case{true, false, true, true});
  CAPTURE(c.forward_sync, c.broadcast);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    torch::nn::BatchNorm1d norm(2);
    norm->running_mean.fill_(self.rank + 1.0);
    DistributedDataParallel model(
        norm, in(self).broadcast_buffers(c.broadcast).forward_sync_buffers(c.forward_sync));
    const auto mean = [&] { return norm->running_mean[0].item<double>(); };
    TORCH_CHECK(mean() == (c.at_construction ? 1 : self.rank + 1), "at construction ", mean());
    model->forward(torch::ones({3, 2}) * (10 * self.rank)).sum().backward();
    auto of_all = norm->running_mean.clone();
    std::vector<at::Tensor> wire{of_all};
    self.group->allreduce(wire)->wait();
    const bool same = of_all[0].item<double>() == 2 * mean();
    TORCH_CHECK(same == c.in_passes, "after a pass ", mean());
    model->check_replicas();
  });
  for (const auto& error : errors) CHECK(error.empty());
}

TEST_CASE("lazy buckets give the same gradients", "[ranks][ddp][lazy]") {
  const bool as_views = GENERATE(false, true);
  const bool finds_unused = GENERATE(false, true);
  const bool hooks_in = GENERATE(false, true);
  CAPTURE(as_views, finds_unused, hooks_in);
  const auto run = [&](bool lazy) {
    return run_ranks<std::vector<at::Tensor>>(2, [&](const Rank& self) {
      auto net = make_wide_net();
      DistributedDataParallel model(
          net, in(self)
                   .bucket_cap_mb(0.1)
                   .gradient_as_bucket_view(as_views)
                   .find_unused_parameters(finds_unused)
                   .lazy_bucket_allocation(lazy));
      if (hooks_in) model->register_comm_hook(hooks::bf16_compress(self.group));
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 5; ++step) {
        if (step != 2) optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);  // else accumulates
        const auto x = nested_wave({3, 128}, self.rank + step).to(torch::kFloat);
        {
          const auto guard = model->no_sync();
          model->forward(x).square().sum().backward();
        }
        model->forward(-x).square().mean().backward();
        optimizer.step();
      }
      std::vector<at::Tensor> values;
      for (const auto& p : net->parameters()) {
        values.push_back(p.detach().clone());
        values.push_back(p.grad().clone());
      }
      return values;
    });
  };
  const auto expected = run(false), got = run(true);
  for (size_t rank = 0; rank < expected.size(); ++rank) CHECK(all_equal(got[rank], expected[rank]));
}

TEST_CASE("lazy buckets and activations are not in memory together", "[ranks][ddp][lazy]") {
  const bool as_views = GENERATE(false, true);
  CAPTURE(as_views);
  constexpr int64_t kGradients = 4 * 128 * 128 * sizeof(float);
  constexpr int64_t kRows = 1024;  // activations are larger than gradients
  const auto peak_of = [&](bool lazy) {
    // One rank packs its buckets as several do, and all memory is its thread's.
    return run_ranks<int64_t>(1, [&](const Rank& self) {
      return peak_bytes_of([&] {
        DistributedDataParallel model(
            make_wide_net(),
            in(self).bucket_cap_mb(0.1).gradient_as_bucket_view(as_views).lazy_bucket_allocation(
                lazy));
        const auto x = nested_wave({kRows, 128}, 0).to(torch::kFloat);
        for (int step = 0; step < 4; ++step) {
          model->zero_grad();
          model->forward(x).square().mean().backward();
        }
      });
    })[0];
  };
  const auto kept = peak_of(false), lazy = peak_of(true);
  CAPTURE(kept, lazy, kGradients);
  // Each is at its peak when backward begins: all activations are there, and no gradient.
  CHECK(kept - lazy > kGradients * 9 / 10);
}

}  // namespace ddp
