// One rank fails: the others throw its reason in bounded time, and no rank hangs.
#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

// Multiplies by a weight; throws when the test asks for it.
class FragileImpl : public torch::nn::Module {
 public:
  FragileImpl() {
    w = register_parameter("w", torch::ones({4}));
    v = register_parameter("v", torch::ones({4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    TORCH_CHECK(!throw_in_forward, "forward boom");
    auto y = x * w;
    if (throw_in_backward) {
      y = y * 2;
      y.register_hook([](const at::Tensor&) { TORCH_CHECK(false, "backward boom"); });
    }
    return y * v;
  }
  void replace_v() {
    parameters_.erase("v");
    v = register_parameter("v", torch::ones({4}));
  }
  at::Tensor w, v;
  bool throw_in_forward = false;
  bool throw_in_backward = false;
};
TORCH_MODULE(Fragile);

void step(DistributedDataParallel<Fragile>& model) {
  model->forward(torch::ones({4})).sum().backward();
}

struct Seen {
  TimedError first;
  std::string next;
};

constexpr const char* kAborted =
    ". The process group is aborted: end the job, or make a new process group and wrapper.";

// Rank 1 continues only after the others have failed.
void wait_for_the_others(const Rank& self) {
  const auto key = [](int rank) { return "failed/" + std::to_string(rank); };
  if (self.rank != 1) return self.store->set(key(self.rank), "1");
  for (int rank = 0; rank < self.size; ++rank) {
    if (rank != 1) self.store->wait({key(rank)});
  }
}

}  // namespace

TEST_CASE(
    "a rank that throws stops the others with its message", "[ranks][errors][failure][many]") {
  const bool in_forward = GENERATE(true, false);
  const bool rebuilt = GENERATE(false, true);
  const bool hooked = GENERATE(false, true);
  CAPTURE(in_forward, rebuilt, hooked);
  const auto seen = run_ranks<Seen>(3, kLongTimeout, [&](const Rank& self) {
    Fragile net;
    DistributedDataParallel model(net, in(self));
    if (hooked) model->register_comm_hook(hooks::all_reduce(self.group));
    for (int i = 0; rebuilt && i < 2; ++i) step(model);
    if (self.rank == 1) (in_forward ? net->throw_in_forward : net->throw_in_backward) = true;
    Seen seen;
    seen.first = timed_error_of([&] { step(model); });
    net->throw_in_forward = net->throw_in_backward = false;
    wait_for_the_others(self);
    seen.next = error_of([&] { step(model); });
    return seen;
  });
  const std::string cause =
      in_forward ? "forward threw on rank 1 of 3: forward boom"
                 : "backward threw on rank 1 of 3, after 0 of 1 buckets were sent: backward boom";
  const std::string text = cause + kAborted;
  CHECK_THAT(seen[1].first.error, ContainsText("boom"));
  for (const int rank : {0, 2}) {
    CHECK(seen[rank].first.error == text);
    CHECK(seen[rank].first.seconds < 20);
  }
  for (const auto& rank : seen) CHECK(rank.next == text);
}

TEST_CASE("a failed wrapper throws its reason at the next call", "[ranks][errors][failure][many]") {
  const auto reduction = GENERATE(Reduction::Mean, Reduction::SampleWeighted);
  const std::string next = GENERATE("step", "join", "join without input");
  CAPTURE(next);
  const auto seen = run_ranks<std::string>(3, kLongTimeout, [&](const Rank& self) {
    Fragile net;
    DistributedDataParallel model(net, in(self).reduction(reduction));
    step(model);
    net->throw_in_forward = self.rank == 1;
    TORCH_CHECK(!error_of([&] { step(model); }).empty());
    net->throw_in_forward = false;
    wait_for_the_others(self);
    return error_of([&] {
      if (next == "step") step(model);
      if (next == "join") model->join([&] { step(model); });
      if (next == "join without input") model->join([] {});
    });
  });
  for (const auto& error : seen) {
    CHECK(error == std::string("forward threw on rank 1 of 3: forward boom") + kAborted);
  }
}

TEST_CASE(
    "a forward that throws on every rank leaves the wrapper usable",
    "[ranks][errors][failure][many]") {
  const bool as_views = GENERATE(false, true);
  const int size = GENERATE(1, 2, 3);
  const auto seen = run_ranks<float>(size, kLongTimeout, [&](const Rank& self) {
    Fragile net;
    DistributedDataParallel model(
        net, in(self).bucket_cap_mb(1e-6).gradient_as_bucket_view(as_views));
    for (int i = 0; i < 2; ++i) step(model);
    net->throw_in_forward = true;
    TORCH_CHECK(error_of([&] { step(model); }).find("boom") != std::string::npos);
    net->throw_in_forward = false;
    net->zero_grad();
    model->forward(torch::full({4}, self.rank + 1.0f)).sum().backward();
    return net->w.grad()[0].item<float>();
  });
  for (const float gradient : seen) CHECK(gradient == Approx((size + 1) / 2.0));
}

TEST_CASE("a backward that throws aborts the group", "[ranks][errors][failure][many]") {
  const int size = GENERATE(1, 2, 3);
  const bool on_all = GENERATE(true, false);
  const auto next = run_ranks<std::string>(size, kLongTimeout, [&](const Rank& self) {
    Fragile net;
    // One bucket a parameter: v's is being reduced when w's gradient fails.
    DistributedDataParallel model(net, in(self).bucket_cap_mb(1e-6));
    for (int i = 0; i < 2; ++i) step(model);
    net->throw_in_backward = on_all || self.rank == 0;
    TORCH_CHECK(!error_of([&] { step(model); }).empty());
    net->throw_in_backward = false;
    return error_of([&] { step(model); });
  });
  for (const auto& error : next) {
    CHECK(error == next[0]);
    if (size == 1) {
      CHECK(error.empty());  // no rank failed
    } else {
      CHECK_THAT(error, ContainsText("backward threw on rank") && ContainsText(kAborted));
    }
  }
}

TEST_CASE("a left-out backward pass is an error on all ranks", "[ranks][errors][failure][many]") {
  const auto seen = run_ranks<Seen>(3, kLongTimeout, [&](const Rank& self) {
    Fragile net;
    DistributedDataParallel model(net, in(self));
    step(model);
    if (self.rank == 2) model->forward(torch::ones({4}));
    Seen seen;
    seen.first = timed_error_of([&] { step(model); });
    seen.next = error_of([&] { step(model); });
    return seen;
  });
  const std::string remedy =
      "Every rank has to run as many forward and backward passes; evaluate in eval() mode or under "
      "torch::NoGradGuard, and put a loop that calls forward into one run().";
  for (const auto& rank : seen) {
    CHECK(
        rank.first.error ==
        "Reducer: 1 training forward passes came since the last reduced backward pass on ranks 0, "
        "1 of 3. " +
            remedy +
            "\nReducer: 2 training forward passes came since the last reduced backward pass on "
            "rank 2 of 3. " +
            remedy);
    CHECK(rank.next.empty());
  }
}

TEST_CASE("a destroyed group starts no more collectives", "[ranks][errors][failure]") {
  const auto results = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    DistributedDataParallel<Fragile> model(Fragile(), in(self));
    step(model);
    const auto loss = model->forward(torch::ones({4})).sum();
    barrier(self.group);
    self.group->shutdown();  // as destroy_process_group() does
    auto tensor = torch::ones({4});
    std::vector<at::Tensor> tensors{tensor};
    const int other = 1 - self.rank;
    std::vector<std::string> errors{
        error_of([&] { self.group->allreduce(tensors); }),
        error_of([&] { self.group->send(tensors, other, 0); }),
        error_of([&] { self.group->recv(tensors, other, 0); }),
        error_of([&] { self.group->recvAnysource(tensors, 0); }),
        error_of([&] { loss.backward(); }),
        error_of([&] { all_reduce(tensor, self.group); }),
        error_of([&] { barrier(self.group); }),
        error_of([&] { model->forward(torch::ones({4})); })};
    self.wait_until_others_end();
    return errors;
  });
  for (const auto& rank : results) {
    for (size_t i = 0; i < rank.size(); ++i) {
      CAPTURE(i);
      CHECK_THAT(
          rank[i],
          ContainsText(
              "process group: expected one that is in use, got one that was destroyed on rank "));
    }
    CHECK_THAT(rank[4], ContainsText("bucket"));
  }
}

TEST_CASE("ranks may differ in evaluations with gradients enabled", "[ranks][failure]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    Fragile net;
    DistributedDataParallel model(net, in(self));
    step(model);
    model->eval();
    for (int i = 0; i < 3 * self.rank; ++i) model->forward(torch::ones({4}));
    net->throw_in_forward = self.rank == 1;  // caught on this rank, so no other rank fails
    error_of([&] { model->forward(torch::ones({4})); });
    net->throw_in_forward = false;
    model->train();
    step(model);
  });
  CHECK(errors == std::vector<std::string>{"", ""});
}

TEST_CASE(
    "a timeout names the bucket and the ranks that had arrived", "[ranks][errors][failure][many]") {
  // Ranks report where they wait after two seconds, and some begin later.
  const RanksOptions options{std::chrono::seconds(6)};
  const bool rebuilt = GENERATE(false, true);
  const bool hooked = GENERATE(false, true);
  const auto errors = errors_of_ranks(3, options, [&](const Rank& self) {
    Fragile net;
    DistributedDataParallel model(net, in(self));
    if (hooked) model->register_comm_hook(hooks::all_reduce(self.group));
    for (int i = 0; i < (rebuilt ? 2 : 1); ++i) step(model);
    if (self.rank == 1) {
      self.wait_until_others_end();
      return;
    }
    step(model);
  });
  for (const int rank : {0, 2}) {
    CHECK_THAT(
        errors[rank], ContainsText("reducing bucket 0 of 1 (32 bytes: ") && ContainsText("w") &&
                          ContainsText("v") &&
                          ContainsText("ranks 0, 2 had arrived, rank 1 had not") &&
                          ContainsText(kAborted));
  }
  CHECK(errors[0] == errors[2]);
}

TEST_CASE("the other ranks stop when a rank leaves", "[ranks][errors][failure]") {
  const auto errors = errors_of_ranks(2, kLongTimeout, [](const Rank& self) {
    Fragile net;
    DistributedDataParallel model(net, in(self));
    step(model);
    TORCH_CHECK(self.rank == 0, "I am leaving");
    step(model);
  });
  CHECK_THAT(
      errors[0], ContainsText("an exception in the program of rank 1 of 2 ended its part") &&
                     ContainsText(kAborted));
  CHECK(errors[1] == "I am leaving");
}

TEST_CASE(
    "a rank that leaves before it sent its buffers stops the others", "[ranks][errors][failure]") {
  const auto errors = errors_of_ranks(2, kLongTimeout, [](const Rank& self) {
    torch::nn::BatchNorm1d net(4);
    DistributedDataParallel model(net, in(self));
    const auto x = torch::ones({2, 4}) * torch::tensor({{1.0}, {2.0}});
    for (int step = 0; step < 2; ++step) model->forward(x).sum().backward();
    TORCH_CHECK(self.rank == 1, "I am leaving");
    model->forward(x).sum().backward();
  });
  CHECK(errors[0] == "I am leaving");
  CHECK_THAT(
      errors[1], ContainsText("an exception in the program of rank 0 of 2 ended its part") &&
                     ContainsText(kAborted));
}

TEST_CASE("a second backward pass is averaged", "[ranks][failure]") {
  const bool as_views = GENERATE(false, true);
  const bool retain = GENERATE(false, true);
  const int size = GENERATE(1, 2);
  const auto gradients = run_ranks<std::vector<float>>(size, [&](const Rank& self) {
    Fragile net;
    DistributedDataParallel model(net, in(self).gradient_as_bucket_view(as_views));
    std::vector<float> seen;
    for (int i = 0; i < 3; ++i) {
      net->zero_grad();
      const auto x = torch::full({4}, self.rank + 1.0f);
      const auto first = model->forward(x).sum();
      const auto second = retain ? first : model->forward(x * 10).sum();
      first.backward({}, /*retain_graph=*/retain);
      seen.push_back(net->w.grad()[0].item<float>());
      second.backward();
      seen.push_back(net->w.grad()[0].item<float>());
    }
    return seen;
  });
  const float mean = (size + 1) / 2.0f;
  const float both = retain ? 2 * mean : 11 * mean;
  for (const auto& seen : gradients) {
    CHECK(seen == std::vector<float>{mean, both, mean, both, mean, both});
  }
}

TEST_CASE("a pass under no_sync stays local after a reduced one", "[ranks][failure]") {
  const auto gradients = run_ranks<float>(2, [](const Rank& self) {
    Fragile net;
    DistributedDataParallel model(net, in(self));
    step(model);
    net->zero_grad();
    const auto guard = model->no_sync();
    model->forward(torch::full({4}, self.rank + 1.0f)).sum().backward();
    return net->w.grad()[0].item<float>();
  });
  CHECK(gradients == std::vector<float>{1, 2});
}

TEST_CASE("errors explain frozen, unfrozen and replaced parameters", "[ranks][errors][failure]") {
  const std::string what = GENERATE("frozen", "thawed", "replaced");
  const auto error = error_of_all(2, [&](const Rank& self) {
    Fragile net;
    if (what == "thawed") net->v.set_requires_grad(false);
    DistributedDataParallel model(net, in(self));
    step(model);
    if (self.rank == 1) {
      if (what == "frozen") net->v.set_requires_grad(false);
      if (what == "thawed") net->v.set_requires_grad(true);
      if (what == "replaced") net->replace_v();
    }
    step(model);
  });
  CHECK_THAT(error, ContainsText("on rank 1 of 2"));
  if (what == "frozen") {
    CHECK_THAT(error, ContainsText("(v: frozen after the module was wrapped)"));
  }
  if (what == "thawed") {
    CHECK_THAT(error, ContainsText("(v: required no gradient when the module was wrapped)"));
  }
  if (what == "replaced") {
    CHECK_THAT(error, ContainsText("(v: replaced in the module after it was wrapped"));
  }
}

TEST_CASE(
    "a training pass that only one rank ran is an error before any collective", "[ranks][errors]") {
  RanksOptions options = kLongTimeout;
  options.backend = "shm";  // Gloo ends the process where sizes differ
  const auto error = error_of_all(2, options, [](const Rank& self) {
    Fragile net;
    DistributedDataParallel model(net, in(self));
    step(model);
    if (self.rank == 0) step(model);
    auto metric = torch::ones({1});
    all_reduce(metric, c10d::ReduceOp::SUM, self.group);
  });
  CHECK_THAT(
      error,
      Catch::Matchers::StartsWith("rank 0 began a training forward pass that rank 1 did not. Every "
                                  "rank has to train on as many batches, or in join(): ") &&
          ContainsText("expected every rank to call the same collective"));
}

TEST_CASE("an uncaught error prints a few lines without a stack", "[ranks][errors]") {
  const auto texts = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    torch::nn::Sequential net;
    for (int i = 0; i < 30; ++i) net->push_back(torch::nn::Linear(2, 2));
    DistributedDataParallel model(net, in(self));
    net->to(at::kDouble);
    std::vector<std::string> seen;
    const auto see = [&](const std::function<void()>& act) {
      try {
        act();
      } catch (const std::exception& error) {
        seen.push_back(error.what());  // as std::terminate prints it
      }
    };
    see([&] { model->forward(torch::ones({1, 2}, at::kDouble)).sum().backward(); });
    see([&] { DistributedDataParallel other(torch::nn::Sequential(), in(self)); });
    see([&] { DistributedDataParallel other(torch::nn::Linear(2, 2 + self.rank), in(self)); });
    see([&] { model->count_samples(-1); });
    return seen;
  });
  for (const auto& of_rank : texts) {
    REQUIRE(of_rank.size() == 4);
    for (const auto& text : of_rank) {
      CHECK(std::count(text.begin(), text.end(), '\n') < 3);
      CHECK(text.size() < 600);
      CHECK_THAT(text, !ContainsText("frame #") && !ContainsText("Exception raised from"));
    }
    CHECK_THAT(
        of_rank[0], ContainsText("for 60 of 60 parameters (0.weight, 0.bias, 1.weight, ") &&
                        ContainsText("and 50 more: moved to Double on cpu after the module was "
                                     "wrapped) on every rank. Move the module before"));
  }
}

}  // namespace ddp
