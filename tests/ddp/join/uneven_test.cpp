// Ranks that run different passes: all ranks throw, with the reason.
#include <thread>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

// Two heads; a pass may leave out either.
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

TEST_CASE(
    "the error gives the remedy for the reason of a missing gradient", "[ranks][errors][ddp]") {
  const int reason = GENERATE(0, 1, 2);
  const auto error = error_of_all(2, [&](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self));
    step(model);
    if (self.rank == 0) return step(model);
    // Not used in forward; used, but not in the loss; used, but its output was dropped.
    auto heads = model->forward(torch::ones({1, 2}), /*both=*/reason != 0);
    if (reason == 2) heads.pop_back();
    heads[0].backward();
  });
  const std::string subject =
      "Reducer: backward ended without gradients for 1 of 2 parameters (right.weight";
  const std::string expected[] = {
      subject +
          ": not used in forward) on rank 1 of 2. If a forward pass may skip parameters, set "
          "find_unused_parameters(true).",
      subject +
          ": did not contribute to this loss) on rank 1 of 2. Use every output of forward in "
          "the loss, or set find_unused_parameters(true).",
      subject +
          ") on rank 1 of 2. If a forward pass may skip parameters, set "
          "find_unused_parameters(true); if not, check that the loss uses every output."
          " The results of ddp::all_gather carry no gradient; those of ddp::functional::all_gather "
          "do."};
  CHECK(error == expected[reason]);
}

TEST_CASE("a module that moved after it was wrapped is an error", "[ranks][errors][ddp]") {
  const int mode = GENERATE(0, 1, 2);
  const bool trained_before = GENERATE(false, true);
  CAPTURE(mode, trained_before);
  const auto error = error_of_all(2, [&](const Rank& self) {
    Heads net;
    DistributedDataParallel model(
        net, in(self).find_unused_parameters(mode == 1).static_graph(mode == 2));
    if (trained_before) step(model);
    net->zero_grad();
    net->to(at::kDouble);
    step(model, at::kDouble);
  });
  CHECK_THAT(
      error, ContainsText("(left.weight, right.weight: moved to Double on cpu after the "
                          "module was wrapped) on every rank. Move the module before wrapping "
                          "it, or call model->refresh() on every rank."));
}

TEST_CASE(
    "a replaced parameter is an error also where some may be unused", "[ranks][errors][ddp]") {
  const bool is_static = GENERATE(false, true);
  const auto error = error_of_all(2, [&](const Rank& self) {
    Heads net;
    DistributedDataParallel model(
        net, in(self).find_unused_parameters(!is_static).static_graph(is_static));
    if (!is_static) step(model);
    if (self.rank == 1) net->replace_right();
    step(model);
  });
  CHECK_THAT(
      error,
      ContainsText("gradients are not averaged for 1 of 2 parameters (right.weight: replaced in "
                   "the module after it was wrapped) on rank 1 of 2. Call model->refresh()"));
}

TEST_CASE(
    "after an error a further backward pass throws, and is not local", "[ranks][errors][ddp]") {
  const auto seen = run_ranks<std::vector<std::string>>(2, kLongTimeout, [](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self));
    step(model);
    net->throw_in_backward = true;
    const auto heads = model->forward(torch::ones({1, 2}));
    const auto loss = heads[0] + heads[1];
    const auto first = error_of([&] { loss.backward({}, /*retain_graph=*/true); });
    const auto second = error_of([&] { heads[1].backward(); });
    return std::vector<std::string>{first, second};
  });
  for (const auto& errors : seen) {
    CHECK_THAT(errors[0], ContainsText("boom"));
    CHECK_THAT(errors[1], ContainsText("backward threw on rank") && ContainsText("aborted"));
  }
}

TEST_CASE("ranks whose forwards all threw may be far apart in time", "[ranks][errors][ddp]") {
  struct Case {
    Reduction reduction;
    bool joined;
  };
  const auto c = GENERATE(
      Case{Reduction::Mean, false}, Case{Reduction::SampleWeighted, false},
      Case{Reduction::Mean, true});
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self).reduction(c.reduction));
    const auto train = [&] {
      step(model);
      TORCH_CHECK(!error_of([&] { model->forward(torch::ones({1, 3})); }).empty());
      // Longer than the others wait before they check for failures, as while saving a checkpoint.
      if (self.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      step(model);
    };
    c.joined ? model->join(train) : train();
  });
  CHECK(errors == std::vector<std::string>{"", ""});
}

TEST_CASE(
    "forwards that threw on all ranks fail no pass after an uneven join", "[ranks][errors][ddp]") {
  const bool alone = GENERATE(false, true);
  const auto errors = errors_of_ranks(2, kLongTimeout, [&](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self));
    model->join([&] {
      for (int i = 0; i < 5 - 2 * self.rank; ++i) step(model);
    });
    if (!alone || self.rank == 0) {
      TORCH_CHECK(!error_of([&] { model->forward(torch::ones({1, 3})); }).empty());
    }
    if (alone && self.rank == 0) return self.wait_until_others_end();
    const auto seen = timed_error_of([&] {
      step(model);
      if (self.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      step(model);
    });
    TORCH_CHECK(seen.seconds < 20, "after ", seen.seconds, " s: ", seen.error);
    TORCH_CHECK(seen.error.empty(), seen.error);
  });
  CHECK(errors[0].empty());
  if (alone) {
    CHECK_THAT(errors[1], ContainsText("forward threw on rank 0 of 2"));
  } else {
    CHECK(errors[1].empty());
  }
}

TEST_CASE(
    "a rank that continues throws the reason of one that left a failed join",
    "[ranks][errors][ddp]") {
  const auto seen = run_ranks<TimedError>(2, kLongTimeout, [](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self));
    const auto seen = timed_error_of([&] {
      model->join([&] {
        step(model);
        TORCH_CHECK(!error_of([&] { model->forward(torch::ones({1, 3})); }).empty());
        if (self.rank == 1) throw std::runtime_error("no such file");
        step(model);
      });
    });
    // The rank that left keeps its model, without using it.
    if (self.rank == 1) self.wait_until_others_end();
    return seen;
  });
  CHECK(seen[1].error == "no such file");
  CHECK_THAT(
      seen[0].error,
      ContainsText("join's body threw on rank 1 of 2: no such file") && ContainsText("aborted"));
  CHECK(seen[0].seconds < 20);
}

TEST_CASE(
    "many failed forward passes in a row are resolved one by one", "[ranks][errors][ddp][many]") {
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

TEST_CASE("a wait that has ended fails no rank", "[ranks][ddp]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
    DistributedDataParallel model(net, in(self));
    const auto pause = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
    const auto loss = model->forward(torch::ones({4, 2})).sum();
    if (self.rank == 0) pause(900);  // the other rank waits for the buffers so long, and reports it
    {
      const torch::NoGradGuard no_grad;
      model->forward(torch::ones({4, 2}));
    }
    if (self.rank == 1) pause(1500);  // rank 0 waits for the gradients
    loss.backward();
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("any number of left-out backward passes is an error", "[ranks][errors][ddp]") {
  const int left_out = GENERATE(1, 4, 5, 19);
  const auto error = error_of_all(2, [&](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self));
    step(model);
    for (int i = 0; self.rank == 1 && i < left_out; ++i) model->forward(torch::ones({1, 2}));
    step(model);
  });
  CHECK_THAT(
      error, ContainsText("1 training forward passes came since the last reduced backward pass "
                          "on rank 0 of 2") &&
                 ContainsText(std::to_string(left_out + 1) + " training forward passes"));
}

TEST_CASE("the error names a rank that ends its training early", "[ranks][errors][ddp][many]") {
  const auto errors = errors_of_ranks(3, kLongTimeout, [](const Rank& self) {
    Heads net;
    DistributedDataParallel model(net, in(self));
    for (int i = 0; i < 2; ++i) step(model);
    if (self.rank == 1) return;
    const auto seen = timed_error_of([&] { step(model); });
    TORCH_CHECK(seen.seconds < 20, "after ", seen.seconds, " s: ", seen.error);
    TORCH_CHECK(false, seen.error);
  });
  CHECK(errors[1].empty());
  CHECK_THAT(
      errors[0], ContainsText("1") && ContainsText("ended, or left the process group") &&
                     ContainsText("aborted"));
  CHECK(errors[0] == errors[2]);
}

}  // namespace ddp
