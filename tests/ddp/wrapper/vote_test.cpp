// vote(true): which rank is named after a bit of it has changed.
// DDP_TEST_FLIPS=1000 changes as many bits, and prints how many had no effect.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/text.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "ddp/replicas/vote.h"
#include "ddp/wrapping.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace voting {
namespace {

using namespace testing;
using torch::nn::Sequential;

Sequential small_net() {
  Sequential net(torch::nn::Linear(6, 9), torch::nn::Tanh(), torch::nn::Linear(9, 3));
  set_waves(*net, {1.3, 0.2, 0, 0.3});
  return net;
}

at::Tensor batch_of(int rank, int step) {
  return torch::sin(torch::arange(24.0F).view({4, 6}) * (1 + rank) + step);
}

void flip(const at::Tensor& tensor, uint64_t random) {
  const auto size = static_cast<uint64_t>(tensor.nbytes());
  static_cast<uint8_t*>(tensor.data_ptr())[random / 8 % size] ^=
      static_cast<uint8_t>(1U << random % 8);
}

/// Where a bit changes.
enum class Of { Parameter, State, Gradient };

struct Flip {
  Of what = Of::Parameter;
  int rank = 0;
  int step = 0;  // after its forward and backward pass; a gradient before the optimizer's step
  uint64_t random = 0;
};

struct Found {
  int step = 0;  // 0: none
  std::string text;
};

/// Trains with a flip until a pass throws.
std::vector<Found> train_with_flip(int ranks, const Flip& what, int every, int steps) {
  return run_ranks<Found>(ranks, [&](const Rank& self) {
    auto net = small_net();
    DistributedDataParallel model(
        net, in(self).vote(true).check_replicas_every(every).find_nonfinite(true));
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
    model->also_compare({&optimizer});
    Found found;
    for (int step = 1; step <= steps && found.step == 0; ++step) {
      found.text = error_of([&] {
        model->zero_grad();
        model->forward(batch_of(self.rank, step)).square().sum().backward();
      });
      if (!found.text.empty()) {
        found.step = step;
        break;
      }
      const bool is_now = self.rank == what.rank && step == what.step;
      const auto parameters = net->parameters();
      const auto& one = parameters[what.random / 7 % parameters.size()];
      if (is_now && what.what == Of::Gradient) flip(one.grad(), what.random);
      optimizer.step();
      if (is_now && what.what == Of::Parameter) flip(one, what.random);
      if (is_now && what.what == Of::State) {
        const auto& state = static_cast<torch::optim::AdamParamState&>(
            *optimizer.state().at(one.unsafeGetTensorImpl()));
        flip(what.random % 3 == 0 ? state.exp_avg_sq() : state.exp_avg(), what.random);
      }
    }
    return found;
  });
}

std::string wrong_text(int rank) {
  return "By vote wrong: rank " + std::to_string(rank) + " (host";
}

std::vector<Ballot> ballots_of(const std::vector<std::vector<std::string>>& values) {
  std::vector<Ballot> ballots;
  for (const auto& of_rank : values)
    ballots.push_back(
        {of_rank, "h" + std::to_string(ballots.size()), static_cast<int>(ballots.size())});
  return ballots;
}

}  // namespace

TEST_CASE("a vote finds the ranks outside of a majority", "[ddp][vote]") {
  const auto wrong = [](const std::vector<std::vector<std::string>>& values) {
    const auto verdict = vote(ballots_of(values));
    return std::pair(verdict.is_decided, verdict.wrong);
  };
  using Ranks = std::vector<int>;
  CHECK(wrong({{"a"}, {"a"}, {"a"}}) == std::pair(true, Ranks{}));
  CHECK(wrong({{"a"}, {"b"}, {"a"}}) == std::pair(true, Ranks{1}));
  CHECK(wrong({{"b"}, {"a"}, {"a"}, {"c"}, {"a"}}) == std::pair(true, Ranks{0, 3}));
  CHECK(wrong({{"a"}, {"b"}}) == std::pair(false, Ranks{0, 1}));
  CHECK(wrong({{"a"}, {"b"}, {"a"}, {"b"}}) == std::pair(false, Ranks{0, 1, 2, 3}));
  CHECK(wrong({{"a"}, {"b"}, {"c"}}) == std::pair(false, Ranks{0, 1, 2}));
  // The first value that differs counts.
  CHECK(wrong({{"a", "x"}, {"a", "x"}, {"a", "y"}}) == std::pair(true, Ranks{2}));
  CHECK(wrong({{"a", "x"}, {"b", "x"}, {"a", "y"}}) == std::pair(true, Ranks{1}));
}

TEST_CASE("a vote's text names ranks and hosts", "[ddp][vote]") {
  const auto one = ballots_of({{"a"}, {"a"}, {"b"}});
  CHECK(
      describe(vote(one), one) ==
      "By vote wrong: rank 2 (host h2); the other 2 of 3 ranks are equal to the bit.");
  const auto none = ballots_of({{"a"}, {"b"}});
  CHECK(
      describe(vote(none), none) ==
      "No majority of the 2 ranks is equal, so that any of them may be wrong: rank 0 (host h0), "
      "rank "
      "1 (host h1).");
  auto part = one;
  for (auto& ballot : part) ballot.job_rank = 1 + 4 * ballot.job_rank;
  CHECK_THAT(
      describe(vote(part), part),
      ContainsText("By vote wrong: rank 2 (rank 9 of the job, host h2);"));
  CHECK(vote(part).wrong == std::vector<int>{2});
  const auto again = ballot_of(text_of(part[2]));
  CHECK(again.job_rank == 9);
  CHECK(again.values == one[2].values);
  CHECK(again.host == "h2");
}

TEST_CASE("vote names the rank of a changed bit in the next compared pass", "[ranks][ddp][vote]") {
  constexpr int kEvery = 5;
  std::mt19937_64 random(61);
  const char* given = std::getenv("DDP_TEST_FLIPS");
  const int flips = given ? std::atoi(given) : 36;
  int harmless = 0, infinite = 0;
  for (int i = 0; i < flips; ++i) {
    const int ranks = 3 + i % 2;
    Flip what;
    what.what = static_cast<Of>(i % 3);
    what.rank = static_cast<int>(random() % static_cast<uint64_t>(ranks));
    what.step = 1 + static_cast<int>(random() % 7);
    what.random = random();
    CAPTURE(i, ranks, what.rank, what.step, what.random, static_cast<int>(what.what));
    const auto found = train_with_flip(ranks, what, kEvery, what.step + 2 * kEvery);
    // All values are equal again in a later comparison: rounding has dropped some of the lowest
    // bits.
    if (found[0].step == 0) {
      ++harmless;
      continue;
    }
    const bool is_infinite = found[0].text.find("expected finite gradients") != std::string::npos;
    infinite += is_infinite ? 1 : 0;
    // The flip comes after the comparison of its own pass.
    const int compared = (what.step / kEvery + 1) * kEvery;
    CHECK(found[0].step == (is_infinite ? std::min(found[0].step, compared) : compared));
    for (const auto& rank : found) {
      CHECK(rank.step == found[0].step);
      CHECK(rank.text == found[0].text);
    }
    const auto of_finite = ddp::str("on rank ", what.rank, " of ", ranks);
    CHECK_THAT(found[0].text, ContainsText(is_infinite ? of_finite : wrong_text(what.rank)));
  }
  if (given != nullptr) {
    WARN(flips << " flips, " << infinite << " infinite, " << harmless << " without effect");
  }
  CHECK(harmless <= flips / 9);
}

TEST_CASE("of two ranks a vote names both, and of one none", "[ranks][ddp][vote]") {
  const auto found = train_with_flip(2, {Of::Parameter, 1, 2, 12345}, 3, 9);
  for (const auto& rank : found) {
    CHECK(rank.step == 3);
    CHECK_THAT(
        rank.text,
        ContainsText("any of them may be wrong: rank 0 (host ") && ContainsText(", rank 1 (host "));
  }
  CHECK(train_with_flip(1, {Of::Parameter, 0, 2, 12345}, 3, 9)[0].step == 0);
}

TEST_CASE("check_replicas names the wrong rank with vote", "[ranks][ddp][vote]") {
  const auto errors = errors_of_ranks(3, [&](const Rank& self) {
    auto net = small_net();
    DistributedDataParallel model(net, in(self).vote(true));
    model->forward(batch_of(self.rank, 0)).sum().backward();
    if (self.rank == 0) flip(net->parameters()[0], 77);
    model->check_replicas();
  });
  for (const auto& error : errors) {
    CHECK(error == errors[0]);
    CHECK_THAT(error, ContainsText("check_replicas:") && ContainsText(wrong_text(0)));
    CHECK_THAT(error, !ContainsText("refresh()"));  // would spread rank 0's values
  }
}

TEST_CASE(
    "with vote one pass in 50 is compared, and the optimizer in backward", "[ranks][ddp][vote]") {
  const auto steps = run_ranks<int>(3, [&](const Rank& self) {
    auto net = small_net();
    DistributedDataParallel model(net, in(self).vote(true));
    const auto optimizer = std::make_shared<torch::optim::SGD>(
        model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    model->step_in_backward(optimizer);
    for (int step = 1; step <= 60; ++step) {
      const auto error = error_of([&] {
        model->zero_grad();
        model->forward(batch_of(self.rank, step)).square().sum().backward();
      });
      if (!error.empty()) return error.find(wrong_text(2)) == std::string::npos ? -step : step;
      if (self.rank == 2 && step == 30) {
        auto& state = static_cast<torch::optim::SGDParamState&>(
            *optimizer->state().at(net->parameters()[0].unsafeGetTensorImpl()));
        flip(state.momentum_buffer(), 26);  // of an exponent: a lower one fades
      }
    }
    return 0;
  });
  CHECK(steps == std::vector<int>(3, 50));
}

TEST_CASE("vote and also_compare refuse what they cannot do", "[ranks][ddp][vote][errors]") {
  const auto text_of_options = [](bool vote_of_all) {
    return errors_of_ranks(2, [&](const Rank& self) {
      auto options = in(self).vote(vote_of_all || self.rank == 0);
      if (vote_of_all) options.check_replicas_every(0);
      DistributedDataParallel(small_net(), options);
    });
  };
  CHECK_THAT(
      text_of_options(true), Each(ContainsText("expected passes that are compared for vote")));
  CHECK_THAT(text_of_options(false), Each(ContainsText("option \"vote\" is")));
  const auto errors = errors_of_ranks(1, [&](const Rank& self) {
    DistributedDataParallel model(small_net(), in(self));
    CHECK_THAT(
        error_of([&] { model->also_compare({nullptr}); }),
        ContainsText("also_compare: expected optimizers, got a null pointer"));
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(model, torch::optim::SGDOptions(0.1));
    model->also_compare({&zero});
  });
  CHECK_THAT(errors[0], ContainsText("also_compare: expected optimizers with the same state"));
}

}  // namespace voting
}  // namespace ddp
