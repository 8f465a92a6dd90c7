// The host runs ahead of the device over a backend like NCCL, whose wait() makes only the stream
// wait.
#include <functional>
#include <thread>

#include <ddp/internal/reducer.h>
#include <torch/torch.h>

#include "reducer/like_nccl.h"
#include "reducer/reduction/bucket_reduction.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

/// A short timeout: a test waits so long for collectives that never end.
const RanksOptions kShortTimeout{std::chrono::seconds(8)};

/// The error text that `rank_0` returns on rank 0, while rank 1's forward threw and rank 1 does
/// nothing more.
std::string error_after_peer_threw(const std::function<std::string(Trainer&)>& rank_0) {
  std::string text;
  const auto errors = errors_of_ranks(2, kShortTimeout, [&](const Rank& self) {
    Trainer trainer(self);
    trainer.begin();
    if (self.rank == 0) {
      text = rank_0(trainer);
    } else {
      trainer.fail_forward();
      self.wait_until_others_end();
    }
  });
  CHECK(errors == std::vector<std::string>(2));
  return text;
}

}  // namespace

TEST_CASE("gradients are averaged while the host runs ahead of the device", "[ranks][ahead]") {
  const bool as_views = GENERATE(false, true);
  const double cap_mb = GENERATE(1e-6, 25.0);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Trainer trainer(
        self,
        ReducerOptions().stats_every(0).bucket_cap_mb(cap_mb).gradient_as_bucket_view(as_views));
    for (int step = 1; step <= 5; ++step) {
      const auto error = trainer.step();
      TORCH_CHECK(error.empty(), error);
      TORCH_CHECK(torch::equal(trainer.a.grad(), torch::full({3}, 1.5)), trainer.a.grad());
      TORCH_CHECK(torch::equal(trainer.b.grad(), torch::full({3}, 1.5)), trainer.b.grad());
    }
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("the host does not wait for the device's work of this step", "[ranks][ahead]") {
  const int64_t every = GENERATE(0, 1);
  const auto polls = run_ranks<int>(2, [&](const Rank& self) {
    Trainer trainer(self, ReducerOptions().stats_every(every));
    for (int step = 0; step < 3; ++step) trainer.step();
    const auto before = trainer.backend->latest;
    const int polled = before->polls;
    trainer.step();
    TORCH_CHECK(every > 0 || before->polls > polled, "the previous step was not polled");
    return trainer.backend->latest->polls.load();
  });
  for (const int count : polls) CHECK((count > 0) == (every > 0));  // a sampled step waits
}

TEST_CASE("a problem of one rank is an error on all in the next pass", "[ranks][ahead]") {
  const auto errors_by_rank = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    Trainer trainer(self);
    std::vector<std::string> errors;
    for (int step = 1; step <= 5; ++step) {
      errors.push_back(trainer.step(/*skip_b=*/self.rank == 1 && step == 2));
    }
    TORCH_CHECK(torch::equal(trainer.b.grad(), torch::full({3}, 1.5)));
    return errors;
  });
  CHECK(errors_by_rank[0] == errors_by_rank[1]);
  for (const size_t fine : {0, 1, 3, 4}) CHECK(errors_by_rank[0][fine] == "");
  CHECK_THAT(
      errors_by_rank[0][2], ContainsText("rank 1") &&
                                ContainsText("without gradients for 1 of 2") &&
                                ContainsText("b: not used in forward"));
}

TEST_CASE("passes that do not match are an error in the next one", "[ranks][ahead]") {
  const auto errors_by_rank = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    Trainer trainer(self);
    trainer.step();
    if (self.rank == 1) trainer.companion.count.begin();
    const auto first = trainer.step();
    return std::vector<std::string>{first, trainer.step(), trainer.step()};
  });
  CHECK(errors_by_rank[0] == errors_by_rank[1]);
  CHECK(errors_by_rank[0][0] == "");
  CHECK_THAT(errors_by_rank[0][1], ContainsText("2 training forward passes came since"));
  CHECK(errors_by_rank[0][2] == "");
}

TEST_CASE("where a pass may skip parameters, it throws its own problems", "[ranks][ahead]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) {
    Trainer trainer(self, ReducerOptions().find_unused_parameters(true));
    trainer.step(/*skip_b=*/true);
    TORCH_CHECK(!trainer.b.grad().defined());
    trainer.reducer.report_problem("something: is wrong on one rank", "Mend it.");
    return trainer.step();
  });
  for (const auto& error : errors) CHECK_THAT(error, ContainsText("something: is wrong"));
}

TEST_CASE("a rank that throws stops a rank that is one pass ahead", "[ranks][ahead][errors]") {
  const auto error = error_after_peer_threw([](Trainer& trainer) {
    // The first step may find it, too, where this rank is late.
    const auto first = trainer.step();
    return first.empty() ? trainer.step() : first;
  });
  CHECK_THAT(error, ContainsText("forward threw on rank 1") && ContainsText("index 7"));
}

TEST_CASE(
    "a wait of the host ends when another rank threw one pass earlier", "[ranks][ahead][errors]") {
  class NeverOver : public c10d::Work {
   public:
    bool isCompleted() override { return false; }
    bool wait(std::chrono::milliseconds timeout) override {
      std::this_thread::sleep_for(timeout);
      return false;
    }
  };
  const auto error = error_after_peer_threw([](Trainer& trainer) {
    NeverOver work;
    const auto first = trainer.step();
    if (!first.empty()) return first;  // this rank is late
    return error_of<c10::Error>(
        [&] { trainer.reducer.monitor().wait(work, [] { return std::string("something"); }); });
  });
  CHECK_THAT(error, ContainsText("forward threw on rank 1") && ContainsText("index 7"));
}

TEST_CASE("the destructor warns of problems of the last pass", "[ranks][ahead]") {
  const auto warned = run_ranks<std::string>(2, [](const Rank& self) {
    const Warnings warnings;
    {
      Trainer trainer(self);
      trainer.step();
      trainer.step(/*skip_b=*/self.rank == 1);
    }
    return c10::Join("\n", warnings.texts);
  });
  CHECK(warned[0] == "");
  CHECK_THAT(
      warned[1], ContainsText("last reduced backward pass") && ContainsText("b: not used in"));
}

TEST_CASE("a wait for a late rank passes no timeout to NCCL", "[ranks][ahead]") {
  const auto sums = run_ranks<float>(2, [](const Rank& self) {
    Trainer trainer(self);
    const auto group = group_over(trainer.backend, self);
    const auto monitor = monitor_of(group);
    if (self.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(900));
    std::vector<at::Tensor> tensors{torch::ones({1})};
    monitor->wait(*group->allreduce(tensors), [] { return std::string("waiting in a test"); });
    return tensors.front().item<float>();
  });
  CHECK(sums == std::vector<float>{2, 2});
}

TEST_CASE("a further backward pass has the terms of its forward pass", "[ranks][ahead]") {
  const auto gradients = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    Trainer trainer(self);
    std::vector<float> seen;
    for (int i = 0; i < 3; ++i) {
      trainer.reducer.prepare_for_forward();
      const auto loss = trainer.a.sum() + trainer.b.sum();
      trainer.reducer.prepare_for_backward({{loss}, true, PassTerms{/*scale=*/1.0}});
      for (const bool first : {true, false}) {
        trainer.a.mutable_grad().reset();
        trainer.b.mutable_grad().reset();
        loss.backward({}, /*retain_graph=*/first);
        seen.push_back(trainer.a.grad()[0].item<float>());
      }
    }
    return seen;
  });
  for (const auto& seen : gradients) CHECK(seen == std::vector<float>(6, 2));
}

TEST_CASE("an error of the device is thrown by the next pass", "[ranks][ahead]") {
  const auto errors_by_rank = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    Trainer trainer(self);
    const auto first = trainer.step();
    trainer.backend->latest->failure = std::make_exception_ptr(std::runtime_error("a broken link"));
    const auto second = trainer.step();
    return std::vector<std::string>{first, second, trainer.step()};
  });
  for (const auto& rank : errors_by_rank) {
    CHECK(rank[0] == "");
    CHECK_THAT(
        rank[1], ContainsText("exchanging the ranks' status") && ContainsText("broken link"));
    CHECK_THAT(rank[2], ContainsText("broken link"));
  }
}

TEST_CASE("settle() throws the problems of the last pass on every rank", "[ranks][ahead]") {
  const bool by_job = GENERATE(false, true);  // as a checkpoint does
  const auto errors_by_rank = run_ranks<std::vector<std::string>>(2, [&](const Rank& self) {
    Trainer trainer(self);
    const auto settle = [&] {
      return error_of<c10::Error>(
          [&] { by_job ? trainer.monitor->settle_job() : trainer.reducer.settle(); });
    };
    std::vector<std::string> errors{settle(), trainer.step(), settle()};
    errors.push_back(trainer.step(/*skip_b=*/self.rank == 1));
    for (int i = 0; i < 2; ++i) errors.push_back(settle());
    for (int i = 0; i < 2; ++i) errors.push_back(trainer.step());
    TORCH_CHECK(torch::equal(trainer.b.grad(), torch::full({3}, 1.5)));
    return errors;
  });
  CHECK(errors_by_rank[0] == errors_by_rank[1]);
  for (size_t i = 0; i < errors_by_rank[0].size(); ++i) {
    CAPTURE(i);
    const auto& error = errors_by_rank[0][i];
    if (i == 4) {
      CHECK_THAT(error, ContainsText("rank 1") && ContainsText("b: not used in forward"));
    } else {
      CHECK(error == "");
    }
  }
}

TEST_CASE("a backend divides only where that is exact", "[ahead]") {
  for (const int ranks : {1, 2, 4, 64}) CHECK(averages_exactly(at::kBFloat16, ranks));
  for (const int ranks : {3, 6, 12}) {
    CHECK_FALSE(averages_exactly(at::kBFloat16, ranks));
    CHECK_FALSE(averages_exactly(at::kHalf, ranks));
    CHECK(averages_exactly(at::kFloat, ranks));
    CHECK(averages_exactly(at::kDouble, ranks));
  }
}

TEST_CASE("over NCCL gradients are divided, and then added up, as in Python", "[ranks][ahead]") {
  const int ranks = GENERATE(2, 3);
  const auto dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16);
  const bool is_sharded = GENERATE(false, true);
  CAPTURE(ranks, dtype, is_sharded);
  // In float16 the sum of the first number overflows, and the half of the second one is rounded.
  // The order of three equal numbers does not matter.
  const auto gradient_of = [&](int rank) {
    const auto values = torch::tensor({60000.0, 5.96e-8, 1.0, 0.1, -7.0, 1000.3}).repeat({20});
    return (ranks == 3 ? values : values * (1 - 0.3 * rank)).to(dtype);
  };
  auto expected = gradient_of(0) * (1.0 / ranks);
  for (int rank = 1; rank < ranks; ++rank) expected += gradient_of(rank) * (1.0 / ranks);
  const auto averages = run_ranks<at::Tensor>(ranks, [&](const Rank& self) {
    const auto backend = testing::like_nccl(self);
    const auto a = testing::parameter({120}, dtype);
    Reducer reducer({{"a", a}}, group_over(backend, self), ReducerOptions().stats_every(0));
    const auto shards = is_sharded ? reducer.shard_gradients() : nullptr;
    backend->average = true;
    testing::reduced_backward(reducer, [&] { return (a * gradient_of(self.rank)).sum(); });
    TORCH_CHECK(!backend->average, "expected sums, got averages");
    return is_sharded ? shards->front().average : a.grad();
  });
  const auto average = is_sharded ? torch::cat(averages).narrow(0, 0, 120) : averages.back();
  CHECK(torch::equal(average, expected));
  CHECK(expected.isfinite().all().item<bool>());
}

TEST_CASE("lazy buckets are freed before the next pass", "[ranks][ahead][memory]") {
  const bool is_lazy = GENERATE(true, false);
  const auto kept = run_ranks<int>(2, [&](const Rank& self) {
    Trainer trainer(self, ReducerOptions().stats_every(0).lazy_bucket_allocation(is_lazy));
    trainer.begin();
    int kept_after_step = 0;
    for (int step = 0; step < 4; ++step) {
      const auto error = trainer.step();
      TORCH_CHECK(error.empty(), error);
      using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;
      const Memory bucket(trainer.backend->latest->result().front().storage().getWeakStorageImpl());
      trainer.backend->latest = nullptr;
      trainer.backend->synchronize_device();
      if (!bucket.expired()) ++kept_after_step;
    }
    return kept_after_step;
  });
  CHECK(kept == std::vector<int>(2, is_lazy ? 0 : 4));
}

TEST_CASE("sparse gradients over NCCL are refused at construction", "[ranks][ahead][errors]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) {
    const auto group = group_over(testing::like_nccl(self), self);
    return error_of<c10::ValueError>([&] {
      const Reducer reducer({{"table", testing::parameter(), true}}, group);
    });
  });
  CHECK_THAT(errors, Each(ContainsText("without sparse all-reduce, nccl, got \"table\"")));
}

}  // namespace ddp
