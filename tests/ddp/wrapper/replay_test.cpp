// replay_every: which rank is named after an activation or a gradient of it has another bit.
// DDP_TEST_FLIPS=1000 changes as many bits, and prints how many had no effect.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/text.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace replaying {
namespace {

using namespace testing;

/// A wrong computation of a net on this thread's rank.
struct Fault {
  enum class In { None, Activation, Gradient } in = In::None;
  uint64_t random = 0;
  bool of_others = false;  // in the batches that this rank repeats, and not in its own
  bool is_own = false;     // whether it computes its own batch
};
thread_local Fault fault;

at::Tensor with_flip(const at::Tensor& tensor) {
  auto copy = tensor.detach().clone();
  static_cast<uint8_t*>(copy.data_ptr())[fault.random / 8 % copy.nbytes()] ^=
      static_cast<uint8_t>(1U << fault.random % 8);
  return copy;
}

/// A net with statistics, which a repeated pass could change. Dropout has numbers of the process,
/// whose ranks are threads here.
struct NetImpl : torch::nn::Module {
  NetImpl() { set_waves(*this, {1.3, 0.2, 0, 0.3}); }
  at::Tensor forward(const at::Tensor& x) {
    auto h = norm(in(x));
    if (fault.is_own != fault.of_others) {
      if (fault.in == Fault::In::Activation) h = h + (with_flip(h) - h.detach());
      if (fault.in == Fault::In::Gradient) {
        h.register_hook([](const at::Tensor& gradient) { return with_flip(gradient); });
      }
    }
    return out(torch::tanh(h));
  }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(6, 9))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(9))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(9, 3))};
};
TORCH_MODULE(Net);

at::Tensor batch_of(int rank, int step) {
  return torch::sin(torch::arange(24.0F).view({4, 6}) * (1 + rank) + step);
}

struct Trained {
  int step = 0;  // that threw; 0: none
  std::string text;
  std::vector<at::Tensor> state;  // parameters, gradients, buffers
};

std::vector<at::Tensor> state_of(const torch::nn::Module& net) {
  std::vector<at::Tensor> state;
  for (const auto& p : net.parameters()) {
    state.push_back(p.detach());
    state.push_back(p.grad());
  }
  for (const auto& b : net.buffers()) state.push_back(b);
  return state;
}

/// Trains `steps`, of which `at` has a fault on rank `of`.
std::vector<Trained> train(
    int ranks, int every, int steps, int at = 0, int of = 0, const Fault& with = {}) {
  return run_ranks<Trained>(ranks, [&](const Rank& self) {
    Net net;
    DistributedDataParallel model(net, in(self).replay_every(every).broadcast_buffers(false));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    Trained trained;
    for (int step = 1; step <= steps && trained.step == 0; ++step) {
      model->zero_grad();
      trained.text = error_of([&] {
        fault = step == at && self.rank == of ? with : Fault();
        fault.is_own = true;
        auto y = model->forward(batch_of(self.rank, step));
        fault.is_own = false;
        y.square().sum().backward();
      });
      fault = {};
      if (!trained.text.empty()) {
        trained.step = step;
      } else {
        optimizer.step();
      }
    }
    if (trained.step == 0) trained.state = state_of(*net);
    return trained;
  });
}

void check_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    CAPTURE(i);
    CHECK(a[i].equal(b[i]));
  }
}

}  // namespace

TEST_CASE("replayed batches leave no trace", "[ranks][ddp][vote]") {
  const int ranks = GENERATE(1, 2, 3);
  CAPTURE(ranks);
  const auto trained = [&](int every) {
    return run_ranks<std::vector<at::Tensor>>(ranks, [&](const Rank& self) {
      Net net;
      DistributedDataParallel model(net, in(self).replay_every(every));
      torch::optim::SGD optimizer(model->parameters(), 0.01);
      int64_t hooks = 0;
      for (int step = 1; step <= 6; ++step) {
        optimizer.zero_grad();
        {
          const auto guard = model->no_sync();
          model->forward(batch_of(self.rank, step + 10)).sum().backward();
        }
        model->forward(batch_of(self.rank, step)).square().sum().backward();
        for (const auto& p : net->parameters()) {
          hooks += static_cast<int64_t>(torch::autograd::impl::hooks(p).size());
        }
        optimizer.step();
      }
      auto state = state_of(*net);
      state.push_back(torch::full({1}, hooks));
      for (const auto& b : net->buffers()) {
        state.push_back(torch::full({1}, static_cast<int64_t>(b._version())));
      }
      return state;
    });
  };
  const auto without = trained(0), with = trained(2);
  for (size_t rank = 0; rank < with.size(); ++rank) check_equal(with[rank], without[rank]);
}

namespace {

enum class Mode { Double, Negate };

/// Takes all kinds of arguments that can be sent.
struct ManyImpl : torch::nn::Module {
  at::Tensor forward(
      const std::map<std::string, at::Tensor>& named, std::vector<at::Tensor> list, Mode mode,
      const std::optional<double>& scale, const std::pair<at::Tensor, std::string>& pair,
      const std::tuple<int, bool>& numbers, std::array<at::Tensor, 1> one) {
    auto sum = linear(named.begin()->second) * static_cast<double>(named.size());
    for (const auto& t : list) sum = sum + linear(t);
    sum = mode == Mode::Double ? sum * 2 : -sum;
    if (scale) sum = sum * *scale;
    sum = sum + linear(pair.first) * static_cast<double>(pair.second.size());
    return std::get<1>(numbers) ? sum * std::get<0>(numbers) + one[0] : sum;
  }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(3, 2))};
};
TORCH_MODULE(Many);

/// Asks the other ranks in forward.
struct AskingImpl : torch::nn::Module {
  explicit AskingImpl(ProcessGroup g) : group(std::move(g)) {}
  at::Tensor forward(const at::Tensor& x) {
    auto sum = x.detach().sum().reshape({1});
    all_reduce(sum, c10d::ReduceOp::SUM, group);
    return linear(x) * sum;
  }
  const ProcessGroup group;
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(3, 2))};
};
TORCH_MODULE(Asking);

/// A type that only this program knows.
struct Own {
  at::Tensor tensor;
};

struct OwnNetImpl : torch::nn::Module {
  at::Tensor forward(const Own& own) { return linear(own.tensor); }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(3, 2))};
};
TORCH_MODULE(OwnNet);

/// Draws from a counter of its own.
struct MoodyImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return linear(x) * static_cast<double>(++calls); }
  int64_t calls = 0;
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(3, 2))};
};
TORCH_MODULE(Moody);

}  // namespace

TEST_CASE("arguments that differ by rank in kind and number are replayed", "[ranks][ddp][vote]") {
  const auto errors = errors_of_ranks(3, [&](const Rank& self) {
    DistributedDataParallel model(Many(), in(self).replay_every(1));
    const auto r = self.rank;
    const auto x = torch::sin(torch::arange(6.0F).view({2, 3}) + r);
    for (int step = 0; step < 3; ++step) {
      std::map<std::string, at::Tensor> named{{"a", x}};
      if (r == 1) named["b"] = x;
      model
          ->forward(
              named, std::vector<at::Tensor>(static_cast<size_t>(r), x),
              r == 2 ? Mode::Double : Mode::Negate,
              r == 0 ? std::optional<double>(0.5) : std::nullopt,
              std::pair(x, std::string(static_cast<size_t>(r), 'x')), std::tuple(r, r != 1),
              std::array<at::Tensor, 1>{torch::ones({2})})
          .mean()  // an expanded gradient
          .backward();
    }
  });
  for (const auto& error : errors) CHECK(error == "");
}

TEST_CASE("what cannot be replayed is an error on every rank", "[ranks][ddp][vote][errors]") {
  const auto text_of = [](int ranks, const std::function<void(const Rank&)>& body) {
    const auto errors = errors_of_ranks(ranks, body);
    for (const auto& error : errors) CHECK(!error.empty());
    return errors[0];
  };
  const auto x = torch::ones({2, 3});
  const auto kinds = ContainsText("expected calls of forward with arguments that another rank");
  CHECK_THAT(
      text_of(
          2,
          [&](const Rank& self) {
            DistributedDataParallel model(OwnNet(), in(self).replay_every(50));
            model->forward(Own{x}).sum().backward();
          }),
      kinds);
  CHECK_THAT(
      text_of(
          2,
          [&](const Rank& self) {
            torch::nn::Linear net(3, 2);
            DistributedDataParallel model(net, in(self).replay_every(50));
            model->run([&] { return net(x); }).sum().backward();
          }),
      kinds);
  const auto refused = [&](auto net, const DistributedDataParallelOptions& options) {
    return text_of(2, [&](const Rank& self) {
      auto own = options;
      DistributedDataParallel model(net(self), own.process_group(self.group));
    });
  };
  using Options = DistributedDataParallelOptions;
  const auto linear = [](const Rank&) { return torch::nn::Linear(3, 2); };
  CHECK_THAT(refused(linear, Options().replay_every(-1)), ContainsText("for replay_every, got -1"));
  CHECK_THAT(
      refused(
          linear,
          Options().replay_every(2).mixed_precision(MixedPrecision().param_dtype(at::kBFloat16))),
      ContainsText("expected parameters and gradients in their own dtypes"));
  CHECK_THAT(
      refused(
          [](const Rank&) {
            return torch::nn::Embedding(torch::nn::EmbeddingOptions(3, 2).sparse(true));
          },
          Options().replay_every(2)),
      ContainsText("expected dense gradients, got sparse ones of \"weight\""));
  CHECK_THAT(
      text_of(
          3,
          [&](const Rank& self) {
            DistributedDataParallel model(Moody(), in(self).replay_every(2));
            for (int step = 0; step < 2; ++step) model->forward(x).sum().backward();
          }),
      ContainsText("does not repeat itself"));
  CHECK_THAT(
      text_of(
          2,
          [&](const Rank& self) {
            DistributedDataParallel model(Asking(self.group), in(self).replay_every(2));
            for (int step = 0; step < 2; ++step) model->forward(x).sum().backward();
          }),
      ContainsText("whose forward called collectives"));
}

TEST_CASE("a program with hooks on parameters is replayed", "[ranks][ddp][vote]") {
  enum class When { BeforeWrapping, AfterWrapping, BetweenPasses };
  const auto when = GENERATE(When::BeforeWrapping, When::AfterWrapping, When::BetweenPasses);
  CAPTURE(static_cast<int>(when));
  const auto errors = errors_of_ranks(3, [&](const Rank& self) {
    constexpr int kSteps = 3;
    Net net;
    int calls = 0;
    const auto add_hook = [&](When now) {
      if (now == when) net->parameters().front().register_hook([&](const at::Tensor&) { ++calls; });
    };
    add_hook(When::BeforeWrapping);
    DistributedDataParallel model(net, in(self).replay_every(1));
    add_hook(When::AfterWrapping);
    for (int step = 0; step < kSteps; ++step) {
      const auto loss = model->forward(batch_of(self.rank, step)).square().sum();
      if (step == 0) add_hook(When::BetweenPasses);
      loss.backward();
    }
    TORCH_CHECK(calls == kSteps, calls, " calls");
  });
  for (const auto& error : errors) CHECK(error == "");
}

namespace {

/// Returns logits beside what they are computed from, or twice.
struct TwoOutputsImpl : torch::nn::Module {
  explicit TwoOutputsImpl(bool is_twice) : is_twice_(is_twice) {
    set_waves(*this, {1.3, 0.2, 0, 0.3});
  }
  std::vector<at::Tensor> forward(const at::Tensor& x) {
    auto hidden = torch::tanh(in(x));
    auto logits = out(hidden);
    if (is_twice_) return {logits, logits};
    return {logits, hidden};
  }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(6, 9))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(9, 3))};

 private:
  bool is_twice_;
};
TORCH_MODULE(TwoOutputs);

}  // namespace

TEST_CASE("outputs that depend on each other are replayed", "[ranks][ddp][vote]") {
  const bool is_twice = GENERATE(false, true), uses_both = GENERATE(false, true);
  CAPTURE(is_twice, uses_both);
  const auto errors = errors_of_ranks(3, [&](const Rank& self) {
    DistributedDataParallel model(TwoOutputs(is_twice), in(self).replay_every(1));
    for (int step = 0; step < 2; ++step) {
      const auto y = model->forward(batch_of(self.rank, step));
      auto loss = y[0].square().sum();
      if (uses_both) loss = loss + y[1].sin().sum();
      loss.backward();
    }
  });
  for (const auto& error : errors) CHECK(error == "");
}

TEST_CASE("a tensor of also_average is no part of a replayed batch", "[ranks][ddp][vote]") {
  const auto errors = errors_of_ranks(3, [&](const Rank& self) {
    DistributedDataParallel model(Net(), in(self).replay_every(1));
    const auto outside = torch::ones({3}, at::requires_grad());
    model->also_average({outside});
    for (int step = 0; step < 2; ++step) {
      (model->forward(batch_of(self.rank, step)).sum() + outside.exp().sum()).backward();
    }
  });
  for (const auto& error : errors) CHECK(error == "");
}

TEST_CASE("an evaluation before the backward pass names no rank", "[ranks][ddp][vote]") {
  const int evaluating = GENERATE(1, 3);  // that rank alone, or all
  const bool again_trains = GENERATE(false, true);
  CAPTURE(evaluating, again_trains);
  const auto errors = errors_of_ranks(3, [&](const Rank& self) {
    DistributedDataParallel model(
        Net(), in(self).replay_every(1).broadcast_buffers(false).find_unused_parameters(true));
    for (int step = 0; step < 3; ++step) {
      const auto loss = model->forward(batch_of(self.rank, step)).square().sum();
      if (evaluating == 3 || evaluating == self.rank) {
        model->eval();
        model->forward(batch_of(self.rank, step + 7));
        if (again_trains) model->train();
      }
      loss.backward();
      model->train();
    }
  });
  for (const auto& error : errors) CHECK(error == "");
}

TEST_CASE("another error of a pass takes its verdict along", "[ranks][ddp][vote][errors]") {
  const auto errors = run_ranks<std::vector<std::string>>(3, [&](const Rank& self) {
    DistributedDataParallel model(
        Net(), in(self).replay_every(2).broadcast_buffers(false).find_nonfinite(true));
    std::vector<std::string> of_steps;
    for (int step = 1; step <= 4; ++step) {
      of_steps.push_back(error_of([&] {
        model->zero_grad();
        const bool is_faulty = step == 2 && self.rank == 1;
        // The sign bit of an element.
        fault = is_faulty ? Fault{Fault::In::Activation, 31} : Fault();
        fault.is_own = true;
        const auto y = model->forward(batch_of(self.rank, step));
        fault = {};
        auto loss = y.square().sum();
        if (step == 2 && self.rank == 0) loss = loss * INFINITY;
        loss.backward();
      }));
    }
    return of_steps;
  });
  for (const auto& of_rank : errors) {
    CHECK(of_rank[0] == "");
    CHECK(!of_rank[1].empty());
    CHECK(of_rank[1].find("replay_every") == std::string::npos);
    CHECK(of_rank[2] == "");
    CHECK(of_rank[3] == "");
  }
}

TEST_CASE("a replayed pass names the rank of a changed bit", "[ranks][ddp][vote]") {
  std::mt19937_64 random(61);
  const char* given = std::getenv("DDP_TEST_FLIPS");
  const int flips = given ? std::atoi(given) : 24;
  int harmless = 0;
  for (int i = 0; i < flips; ++i) {
    const int ranks = 2 + i % 3;
    const int of = static_cast<int>(random() % static_cast<uint64_t>(ranks));
    Fault with{i % 2 == 0 ? Fault::In::Activation : Fault::In::Gradient, random(), i % 5 == 4};
    CAPTURE(i, ranks, of, static_cast<int>(with.in), with.random, with.of_others);
    const auto trained = train(ranks, 3, 4, 3, of, with);
    if (trained[0].step == 0) {
      ++harmless;  // rounding drops some of the lowest bits, and nothing is wrong then
      continue;
    }
    for (const auto& rank : trained) {
      CHECK(rank.step == 3);
      CHECK(rank.text == trained[0].text);
    }
    const auto name = ddp::str("wrong: rank ", of, " (host ");
    CHECK_THAT(
        trained[0].text,
        ContainsText(ranks == 2 ? "wrong: rank 0 (host " : name) && ContainsText("replay_every:"));
  }
  if (given != nullptr) WARN(flips << " flips, " << harmless << " without effect");
  CHECK(harmless <= flips / 4);
}

}  // namespace replaying
}  // namespace ddp
