// tune_bucket_cap(true): the Reducer measures the first steps and chooses a cap.
#include <chrono>
#include <thread>

#include <ddp/internal/reducer.h>
#include <torch/torch.h>

#include "reducer/passes.h"
#include "reducer/stats/bucket_tuner.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

struct Outcome {
  ReductionStats stats;
  std::vector<std::vector<size_t>> first, last;  // buckets
  int rebuilt_in = 0;                            // the step, from 1
  double gradient = 0;
};

/// Trains three parameters of 2 MiB and a small one; all steps are alike.
Outcome train(const Rank& self, ReducerOptions options, int steps) {
  const int64_t numel = 1 << 19;
  const std::vector<NamedParameter> parameters{
      {"a", parameter({numel})},
      {"b", parameter({numel})},
      {"c", parameter({numel})},
      {"d", parameter({3})}};
  Reducer reducer(parameters, self.group, options.tune_bucket_cap(true));
  Outcome outcome;
  outcome.first = reducer.bucket_indices();
  for (int step = 1; step <= steps; ++step) {
    for (const auto& p : parameters) p.tensor.mutable_grad().reset();
    reduced_backward(reducer, [&] {
      at::Tensor sum = torch::zeros({});
      for (const auto& p : parameters) sum = sum + p.tensor.sum();
      return sum * (self.rank + 1.0);
    });
    if (outcome.rebuilt_in == 0 && reducer.stats().tuning) outcome.rebuilt_in = step;
  }
  outcome.last = reducer.bucket_indices();
  outcome.stats = reducer.stats();
  outcome.gradient = parameters[0].tensor.grad()[7].item<double>();
  return outcome;
}

}  // namespace

TEST_CASE("a cap is chosen from the first steps, the same on all ranks", "[ranks][tuning]") {
  const bool static_graph = GENERATE(false, true);
  const bool find_unused = GENERATE(false, true);
  CAPTURE(static_graph, find_unused);
  const auto outcomes = run_ranks<Outcome>(2, [&](const Rank& self) {
    return train(
        self, ReducerOptions().static_graph(static_graph).find_unused_parameters(find_unused), 16);
  });
  for (const auto& outcome : outcomes) {
    CHECK(outcome.gradient == 1.5);
    CHECK(outcome.first.size() == 1);  // while it measures
    REQUIRE(outcome.stats.tuning);
    const auto& tuning = *outcome.stats.tuning;
    CHECK(tuning.cap_mb == outcomes[0].stats.tuning->cap_mb);
    CHECK(outcome.last == outcomes[0].last);
    CHECK((outcome.last.size() == 1) == (tuning.cap_mb == 10));
    CHECK(tuning.candidates.size() == 4);  // 1, 2, 5, 10 MiB
    CHECK(tuning.latency_ms > 0);
    CHECK(
        tuning.ms_per_mb >= 0);  // on a busy machine a short message can take as long as a long one
    CHECK(tuning.predicted_ms > 0);
    CHECK(tuning.measured_ms > 0);
    CHECK(outcome.rebuilt_in == static_cast<int>(BucketTuner::kPasses) + (static_graph ? 1 : 0));
  }
}

TEST_CASE("copies into buckets count for backward, not for the link", "[ranks][tuning]") {
  const auto pause = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
  struct Seen {
    StepTimes times;
    double link_ms;
  };
  const auto seen = run_ranks<Seen>(2, [&](const Rank& self) {
    BucketTuner tuner(self.group, 1);
    for (size_t pass = 0; pass < BucketTuner::kPasses; ++pass) {
      tuner.begin_backward();
      pause(4);
      tuner.ready(0);
      tuner.autograd_done();
      tuner.begin_pack();
      pause(40);
      tuner.end_pack();
      tuner.communicated();
    }
    const auto cost = tuner.link_cost(1000, 1, [](c10d::Work& work) { work.wait(); });
    return Seen{tuner.step_times(), 1000 * cost.ms_per_byte};
  });
  for (const auto& [times, link_ms] : seen) {
    CHECK(times.backward_ms >= 44);
    CHECK(times.ready_ms.at(0) > 4 + 40 * 0.1);  // stretched as backward was
    CHECK(link_ms < 20);
  }
}

TEST_CASE("a group of one is not tuned", "[ranks][tuning]") {
  const auto outcomes =
      run_ranks<Outcome>(1, [](const Rank& self) { return train(self, ReducerOptions(), 10); });
  CHECK_FALSE(outcomes[0].stats.tuning);
  CHECK(outcomes[0].last.size() == 2);  // as when unset: "d" and "c" close the first MiB
}

TEST_CASE("the rebuild happens at the begin of the next pass", "[ranks][tuning]") {
  const auto rebuilt_before_and_after = run_ranks<std::vector<bool>>(2, [](const Rank& self) {
    const auto p = parameter({1 << 19});
    Reducer reducer(
        {{"p", p}}, self.group,
        ReducerOptions().tune_bucket_cap(true).find_unused_parameters(true));
    const auto backward = [&] {
      const at::Tensor loss = p.sum();
      reducer.prepare_for_backward({{loss}, true});
      loss.backward();
    };
    for (size_t pass = 0; pass < BucketTuner::kPasses; ++pass) {
      reducer.prepare_for_forward();
      backward();
    }
    const bool before = reducer.stats().rebuilds > 0;
    backward();  // without a forward pass before it
    TORCH_CHECK(reducer.stats().tuning, "no cap was chosen");
    return std::vector<bool>{before, reducer.stats().rebuilds > 0};
  });
  for (const auto& rebuilt : rebuilt_before_and_after) {
    CHECK(rebuilt == std::vector<bool>{false, true});
  }
}

TEST_CASE("a tuned cap refuses a communication hook", "[ranks][tuning][errors]") {
  const int size = GENERATE(1, 2);
  const auto errors = errors_of_ranks(size, [](const Rank& self) {
    Reducer reducer({{"p", parameter()}}, self.group, ReducerOptions().tune_bucket_cap(true));
    reducer.register_comm_hook(hooks::all_reduce(self.group));
  });
  CHECK_THAT(errors, Each(ContainsText("register_comm_hook") && ContainsText("kTuneBucketCap")));
}

TEST_CASE("a list of caps is not tuned", "[ranks][tuning]") {
  const auto outcomes = run_ranks<Outcome>(2, [](const Rank& self) {
    return train(self, ReducerOptions().bucket_cap_mb_list({3}), 10);
  });
  CHECK_FALSE(outcomes[0].stats.tuning);
  CHECK(outcomes[0].last.size() == 2);
}

TEST_CASE("a rank without input gets the tuned cap", "[ranks][tuning]") {
  const auto tunings = run_ranks<BucketCapTuning>(2, [](const Rank& self) {
    const std::vector<NamedParameter> parameters{{"a", parameter({1 << 19})}};
    Reducer reducer(parameters, self.group, ReducerOptions().tune_bucket_cap(true).stats_every(0));
    for (int step = 1; step <= 12; ++step) {
      parameters[0].tensor.mutable_grad().reset();
      if (self.rank == 1 && step > 2) {
        reducer.prepare_for_forward();
        reducer.join_backward();
        continue;
      }
      reduced_backward(reducer, [&] { return parameters[0].tensor.sum(); });
    }
    const auto stats = reducer.stats();
    TORCH_CHECK(stats.tuning, "nothing was tuned");
    return *stats.tuning;
  });
  CHECK(tunings[0].cap_mb > 0);
  CHECK(tunings[0].predicted_ms > 0);
  CHECK(tunings[1].cap_mb == tunings[0].cap_mb);
  CHECK(tunings[1].predicted_ms == 0);  // a rank that ended early has no times to predict from
}

}  // namespace ddp
