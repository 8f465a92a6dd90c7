// Ranks that do not do the same: everybody learns it, where it happened.
#include <thread>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using testing::error_of;
using testing::errors_of_ranks;
using testing::in;
using testing::kLongTimeout;
using testing::Rank;
using testing::run_ranks;
using testing::timed_error_of;
using testing::TimedError;

// Two heads, either of which may be left out.
class HeadsImpl : public torch::nn::Module {
 public:
  HeadsImpl() {
    left = register_module("left", torch::nn::Linear(torch::nn::LinearOptions(2, 1).bias(false)));
    right = register_module("right", torch::nn::Linear(torch::nn::LinearOptions(2, 1).bias(false)));
  }
  std::vector<at::Tensor> forward(const at::Tensor& x, bool both = true) {
    const auto y = left->forward(x);
    if (throw_in_backward) {
      y.register_hook([](const at::Tensor&) { TORCH_CHECK(false, "backward boom"); });
    }
    if (!both) return {y.sum()};
    const auto z = right->forward(x);
    if (throw_in_right) {
      z.register_hook([](const at::Tensor&) { TORCH_CHECK(false, "right boom"); });
    }
    return {y.sum(), z.sum()};
  }
  void replace_right() {
    right = replace_module("right", torch::nn::Linear(torch::nn::LinearOptions(2, 1).bias(false)));
  }
  torch::nn::Linear left{nullptr}, right{nullptr};
  bool throw_in_backward = false, throw_in_right = false;
};
TORCH_MODULE(Heads);

void step(DistributedDataParallel<Heads>& model, c10::ScalarType dtype = at::kFloat) {
  const auto heads = model->forward(torch::ones({1, 2}, dtype));
  (heads[0] + heads[1]).backward();
}

}  // namespace

TEST_CASE("the remedy fits the reason for a missing gradient", "[ranks][errors][ddp]") {
  const int reason = GENERATE(0, 1, 2);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self));
    step(model);
    if (self.rank == 0) return step(model);
    // Not used in forward; used, but not in the loss; used, and nobody can tell any more.
    auto heads = model->forward(torch::ones({1, 2}), /*both=*/reason != 0);
    if (reason == 2) heads.pop_back();
    heads[0].backward();
  });
  CHECK(errors[0] == errors[1]);
  const std::string subject =
      "Reducer: backward ended without gradients for 1 of 2 parameters (right.weight";
  const std::string expected[] = {
      subject +
          ": not used in forward) on rank 1 of 2. If a forward pass may skip parameters, set "
          "find_unused_parameters(true).",
      subject +
          ": its output is not in the loss) on rank 1 of 2. Use every output of forward in "
          "the loss, or set find_unused_parameters(true).",
      subject +
          ") on rank 1 of 2. If a forward pass may skip parameters, set "
          "find_unused_parameters(true); if not, check that the loss uses every output."};
  CHECK(errors[0] == expected[reason]);
}

TEST_CASE("a module that moved after it was wrapped is an error", "[ranks][errors][ddp]") {
  const int mode = GENERATE(0, 1, 2);
  const bool trained_before = GENERATE(false, true);
  CAPTURE(mode, trained_before);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Heads net;
    DistributedDataParallel model(
        net, in(self).find_unused_parameters(mode == 1).static_graph(mode == 2));
    if (trained_before) step(model);
    net->zero_grad();
    net->to(at::kDouble);
    step(model, at::kDouble);
  });
  CHECK(errors[0] == errors[1]);
  CHECK_THAT(
      errors[0], ContainsText("left.weight") && ContainsText("right.weight") &&
                     ContainsText("moved to Double on cpu after the module was wrapped; wrap it "
                                  "again"));
}

TEST_CASE(
    "a replaced parameter is an error also where some may be unused", "[ranks][errors][ddp]") {
  const bool is_static = GENERATE(false, true);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Heads net;
    DistributedDataParallel model(
        net, in(self).find_unused_parameters(!is_static).static_graph(is_static));
    if (!is_static) step(model);
    if (self.rank == 1) net->replace_right();
    step(model);
  });
  CHECK(errors[0] == errors[1]);
  CHECK_THAT(
      errors[0],
      ContainsText("the gradient of right.weight is not averaged: it was replaced in the "
                   "module after it was wrapped; wrap it again on rank 1 of 2"));
}

TEST_CASE(
    "after an error a further backward pass is refused, not left local", "[ranks][errors][ddp]") {
  const auto seen = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self));
    step(model);
    net->throw_in_backward = true;
    const auto heads = model->forward(torch::ones({1, 2}));
    net->throw_in_backward = false;
    const auto loss = heads[0] + heads[1];
    const auto first = error_of([&] { loss.backward({}, /*retain_graph=*/true); });
    const auto second = error_of([&] { heads[1].backward(); });
    step(model);  // all ranks threw at the same place: usable again
    return std::vector<std::string>{first, second};
  });
  for (const auto& errors : seen) {
    CHECK_THAT(errors[0], ContainsText("boom"));
    CHECK_THAT(errors[1], ContainsText("Run a forward pass first"));
  }
}

TEST_CASE("ranks that all threw may be far apart in time", "[ranks][errors][ddp]") {
  struct Case {
    Reduction reduction;
    bool joined;
    std::chrono::seconds apart;  // one saves a checkpoint
  };
  const auto c = GENERATE(
      Case{Reduction::Mean, false, std::chrono::seconds(6)},
      Case{Reduction::SampleWeighted, false, std::chrono::seconds(2)},
      Case{Reduction::Mean, true, std::chrono::seconds(2)});
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self).reduction(c.reduction));
    const auto train = [&] {
      step(model);
      net->throw_in_backward = true;
      TORCH_CHECK(!error_of([&] { step(model); }).empty());
      net->throw_in_backward = false;
      if (self.rank == 0) std::this_thread::sleep_for(c.apart);
      step(model);
    };
    c.joined ? model->join(train) : train();
  });
  CHECK(errors == std::vector<std::string>{"", ""});
}

TEST_CASE("ranks that threw in different places are told so at once", "[ranks][errors][ddp]") {
  const bool joined = GENERATE(false, true);
  const auto reduction = GENERATE(Reduction::Mean, Reduction::SampleWeighted);
  const auto seen = run_ranks<TimedError>(
      2,
      [&](const Rank& self) {
        Heads net;
        DistributedDataParallel model(net, in(self).bucket_cap_mb(1e-6).reduction(reduction));
        for (int i = 0; i < 2; ++i) step(model);
        // The right one comes first in backward: behind it, a bucket is on its way.
        (self.rank == 0 ? net->throw_in_backward : net->throw_in_right) = true;
        const auto boom =
            error_of([&] { joined ? model->join([&] { step(model); }) : step(model); });
        TORCH_CHECK(boom.find("boom") != std::string::npos, boom);
        net->throw_in_backward = net->throw_in_right = false;
        return timed_error_of([&] { step(model); });
      },
      kLongTimeout);
  for (const auto& [error, seconds] : seen) {
    CHECK_THAT(error, ContainsText("backward threw on rank") && ContainsText("out of step"));
    CHECK(seconds < 5);
  }
}

TEST_CASE("a rank that goes on is told of one that left a failed join", "[ranks][errors][ddp]") {
  const auto seen = run_ranks<TimedError>(
      2,
      [](const Rank& self) {
        Heads net;
        DistributedDataParallel model(net, in(self));
        const auto seen = timed_error_of([&] {
          model->join([&] {
            step(model);
            net->throw_in_backward = true;
            TORCH_CHECK(!error_of([&] { step(model); }).empty());
            net->throw_in_backward = false;
            if (self.rank == 1) throw std::runtime_error("no such file");
            step(model);
          });
        });
        // The one that left still has its model, but no use for it.
        if (self.rank == 1) self.outlast_the_others();
        return seen;
      },
      kLongTimeout);
  CHECK(seen[1].error == "no such file");
  CHECK_THAT(seen[0].error, ContainsText("out of step"));
  CHECK(seen[0].seconds < 5);
}

TEST_CASE("buckets of a failed pass may take their time", "[ranks][errors][ddp]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self).bucket_cap_mb(1e-6));
    bool is_slow = false;
    model->register_comm_hook([&](GradBucket& bucket) {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      std::thread([future, buffer = bucket.buffer(), is_slow] {
        if (is_slow) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        future->markCompleted(buffer);
      }).detach();
      return future;
    });
    for (int i = 0; i < 2; ++i) step(model);
    is_slow = net->throw_in_backward = true;  // behind the right one's bucket
    TORCH_CHECK(!error_of([&] { step(model); }).empty());
    is_slow = net->throw_in_backward = false;
    step(model);
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("failures in quick succession are settled one by one", "[ranks][errors][ddp][many]") {
  const auto errors = errors_of_ranks(3, [](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self));
    for (int i = 0; i < 20; ++i) {
      TORCH_CHECK(!error_of([&] { model->forward(torch::ones({1, 3})); }).empty());
    }
    step(model);
  });
  CHECK(errors == std::vector<std::string>(3));
}

TEST_CASE("a wait that is over is no sign of trouble", "[ranks][ddp]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
    DistributedDataParallel model(net, in(self));
    const auto pause = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
    const auto loss = model->forward(torch::ones({4, 2})).sum();
    if (self.rank == 0) pause(900);  // so long the other one waits for the buffers, and says so
    {
      const torch::NoGradGuard no_grad;
      model->forward(torch::ones({4, 2}));
    }
    if (self.rank == 1) pause(1500);  // and this one for its gradients
    loss.backward();
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("any number of backward passes left out is noticed", "[ranks][errors][ddp]") {
  const int left_out = GENERATE(1, 4, 5, 19);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self));
    step(model);
    for (int i = 0; self.rank == 1 && i < left_out; ++i) model->forward(torch::ones({1, 2}));
    step(model);
  });
  CHECK(errors[0] == errors[1]);
  CHECK_THAT(
      errors[0], ContainsText("1 training forward passes came since the last reduced backward pass "
                              "on rank 0 of 2") &&
                     ContainsText(std::to_string(left_out + 1) + " training forward passes"));
}

TEST_CASE("a rank that ends its training early is named", "[ranks][errors][ddp][many]") {
  const auto begin = std::chrono::steady_clock::now();
  const auto seen = run_ranks<TimedError>(
      3,
      [](const Rank& self) {
        TimedError seen;
        {
          Heads net;
          DistributedDataParallel model(net, in(self));
          for (int i = 0; i < 2; ++i) step(model);
          if (self.rank != 1) {
            seen = timed_error_of([&] { step(model); });
          }
        }
        if (self.rank == 1) self.outlast_the_others();
        return seen;
      },
      kLongTimeout);
  for (const int rank : {0, 2}) {
    CHECK_THAT(
        seen[rank].error, ContainsText("rank 1 of 3 ended its training after 2 reduced backward "
                                       "passes or less, while rank"));
    CHECK(seen[rank].seconds < 5);
  }
  CHECK(seen[0].error == seen[2].error);
  // Nor do they wait for it when they end their groups.
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
}

}  // namespace ddp
