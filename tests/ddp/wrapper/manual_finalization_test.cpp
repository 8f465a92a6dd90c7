// Backward passes that the program itself ends: require_manual_backward_finalization().
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

using ByHandNet = torch::nn::Sequential;
using ByHandModel = DistributedDataParallel<ByHandNet>;

ByHandNet make_by_hand_net() {
  ByHandNet net(
      torch::nn::Linear(3, 5), torch::nn::Tanh(), torch::nn::BatchNorm1d(5),
      torch::nn::Linear(5, 2));
  set_waves(*net, {0.7, 1, 0});
  return net;
}

at::Tensor by_hand_loss(ByHandModel& model, int rank, int step) {
  const auto x = torch::sin(torch::arange(12) * (0.3 + rank) + step).view({4, 3});
  return model->forward(x).square().mean();
}

/// How a pass is ended.
enum class EndOfPass { ByItself, ByHand, InHook };

struct ByHandEnd {
  std::vector<at::Tensor> values;
  std::vector<char> after;  // should_finalize_after_backward(), by step
};

ByHandEnd train_by_hand(
    const Rank& self, EndOfPass end, const DistributedDataParallelOptions& options) {
  ByHandModel model(make_by_hand_net(), options);
  model->require_manual_backward_finalization(end != EndOfPass::ByItself);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  ByHandEnd result;
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    {
      const auto guard = model->no_sync();
      by_hand_loss(model, self.rank, step + 100).backward();
    }
    // The graph's first node: its hook runs when all parameters have their gradients.
    auto x = torch::sin(torch::arange(12) * (0.3 + self.rank) + step).view({4, 3});
    x.requires_grad_();
    const auto loss = model->forward(x.exp()).square().mean();
    const bool after = model->should_finalize_after_backward();
    result.after.push_back(after ? 1 : 0);
    if (end == EndOfPass::InHook && !after) {
      x.register_hook([&](const at::Tensor&) { model->finalize_backward(); });
      loss.backward();
    } else {
      loss.backward();
      if (end != EndOfPass::ByItself) model->finalize_backward();
    }
    optimizer.step();
  }
  result.values = state_of(*model);
  return result;
}

}  // namespace

TEST_CASE("passes that are finalized by hand train as others do", "[ranks][ddp][by_hand]") {
  const bool as_views = GENERATE(false, true);
  const bool finds_unused = GENERATE(false, true);
  CAPTURE(as_views, finds_unused);
  const auto run = [&](EndOfPass end) {
    return run_ranks<ByHandEnd>(2, [&](const Rank& self) {
      return train_by_hand(
          self, end,
          in(self).bucket_cap_mb(1e-5).gradient_as_bucket_view(as_views).find_unused_parameters(
              finds_unused));
    });
  };
  const auto expected = run(EndOfPass::ByItself);
  for (const auto end : {EndOfPass::ByHand, EndOfPass::InHook}) {
    const auto ends = run(end);
    for (size_t rank = 0; rank < ends.size(); ++rank) {
      CHECK(all_equal(ends[rank].values, expected[rank].values));
      // Two steps until the buckets are final; they are at once where passes may differ.
      CHECK(ends[rank].after == std::vector<char>{finds_unused ? char{0} : char{1}, 0, 0, 0, 0, 0});
    }
  }
}

TEST_CASE("a pass is on its way until it is finalized", "[ranks][ddp][by_hand]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    ByHandModel model(make_by_hand_net(), in(self));
    model->require_manual_backward_finalization(true);
    for (int step = 0; step < 3; ++step) {
      for (auto& p : model->parameters()) p.mutable_grad().reset();
      by_hand_loss(model, self.rank, step).backward();
      const auto local = model->parameters()[0].grad().clone();
      auto of_all = local.clone();
      // The program's own collective, after the buckets and before their end.
      std::vector<at::Tensor> wire{of_all};
      self.group->allreduce(wire)->wait();
      model->finalize_backward();
      if (self.group->getBackendName() != "gloo") continue;
      const auto& average = model->parameters()[0].grad();
      TORCH_CHECK(torch::allclose(average, of_all / 2), average, of_all / 2);
      TORCH_CHECK(!torch::allclose(average, local));
    }
  });
  for (const auto& error : errors) CHECK(error.empty());
}

TEST_CASE("finalizing by hand is refused at the wrong time", "[ranks][ddp][by_hand][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    const auto expect = [](const auto& call, const char* text) {
      const auto error = error_of(call);
      TORCH_CHECK(error.find(text) != std::string::npos, text, " is not in ", error);
    };
    ByHandModel model(make_by_hand_net(), in(self));
    const auto finalize = [&] { model->finalize_backward(); };
    expect(finalize, "expected require_manual_backward_finalization(true)");
    TORCH_CHECK(!model->should_finalize_after_backward());
    model->require_manual_backward_finalization(true);
    TORCH_CHECK(model->require_manual_backward_finalization());
    expect(finalize, "expected an averaged backward pass that is not finalized");
    {
      const auto guard = model->no_sync();
      by_hand_loss(model, self.rank, 0).backward();
    }
    expect(finalize, "expected an averaged backward pass that is not finalized");
    auto loss = by_hand_loss(model, self.rank, 1);
    const auto set = [&] { model->require_manual_backward_finalization(false); };
    expect(set, "expected to be set between two steps");
    expect(finalize, "expected an averaged backward pass that is not finalized");
    loss.backward();
    expect(set, "expected to be set between two steps");
    expect([&] { by_hand_loss(model, self.rank, 2); }, "expected finalize_backward() before");
    expect([&] { model->refresh(); }, "got a call in a backward pass that is not finalized");
    expect([&] { model->settle(); }, "got a call before the end of an averaged backward pass");
    {
      const torch::NoGradGuard evaluation;
      by_hand_loss(model, self.rank, 2);
    }
    model->finalize_backward();
    set();
    by_hand_loss(model, self.rank, 3).backward();
    model->check_replicas();
  });
  for (const auto& error : errors) CHECK(error.empty());
}

TEST_CASE("an error of a pass comes when it is finalized", "[ranks][ddp][by_hand][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    ByHandModel model(make_by_hand_net(), in(self));
    model->require_manual_backward_finalization(true);
    by_hand_loss(model, self.rank, 0);
    if (self.rank == 1) {
      const auto missing = model->module()[3]->as<torch::nn::Linear>()->bias;
      missing.set_requires_grad(false);
    }
    by_hand_loss(model, self.rank, 0).backward();
    model->finalize_backward();
  });
  for (const auto& error : errors) {
    CAPTURE(error);
    CHECK(error.find("3.bias") != std::string::npos);
  }
}

}  // namespace ddp
