// The measurements of a reducer, and their summary and trace.
#include <ddp/reduction_stats.h>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <c10/util/env.h>
#include <ddp/internal/inter_host_timer.h>
#include <ddp/internal/optimizer_time.h>
#include <ddp/internal/reducer.h>
#include <torch/torch.h>

#include "reducer/stats/rate.h"
#include "reducer/stats/step_recorder.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

StepStats step_of(double compute, double communication, double exposed) {
  StepStats step;
  step.step_ms = compute + exposed;
  step.compute_ms = compute;
  step.total_ms = compute + exposed;
  step.communication_ms = communication;
  step.exposed_ms = exposed;
  return step;
}

/// A model of two layers, one bucket each, trained for `steps`.
ReductionStats train(const Rank& self, int steps, int64_t every) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::Linear(64, 64));
  std::vector<NamedParameter> parameters;
  for (const auto& p : net->named_parameters()) parameters.push_back({p.key(), p.value()});
  Reducer reducer(
      parameters, self.group, ReducerOptions().bucket_cap_mb_list({0.016}).stats_every(every));
  for (int i = 0; i < steps; ++i) {
    net->zero_grad();
    reducer.prepare_for_forward();
    const auto y = net->forward(torch::ones({4, 64})).sum();
    reducer.prepare_for_backward({{y}, true});
    y.backward();
  }
  return reducer.stats();
}

int64_t resident_bytes() {
  std::ifstream pages("/proc/self/statm");
  int64_t all = 0, resident = 0;
  pages >> all >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

}  // namespace

TEST_CASE("communication in the call that launches counts as exposed", "[ranks][stats]") {
  const auto stats = run_ranks<ReductionStats>(1, [](const Rank& self) {
    const auto a = torch::ones({3}).set_requires_grad(true);
    const auto b = torch::ones({3}).set_requires_grad(true);
    Reducer reducer({{"a", a}, {"b", b}}, self.group, ReducerOptions().bucket_cap_mb_list({1e-6}));
    reducer.register_comm_hook([](GradBucket& bucket) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(bucket.buffer());
      return future;
    });
    reducer.prepare_for_forward();
    const auto loss = a.sum() + b.sum();
    reducer.prepare_for_backward({{loss}, true});
    loss.backward();
    return reducer.stats();
  });
  const auto& step = stats[0].steps.at(0);
  CHECK(step.exposed_ms >= 40);  // one bucket during autograd, one after it
  CHECK(step.exposed_ms <= step.communication_ms);
}

TEST_CASE("buckets hold memory for the gradients that are packed", "[ranks][stats]") {
  const auto stats = run_ranks<ReductionStats>(
      2, testing::over("gloo"), [](const Rank& self) { return train(self, 2, /*every=*/1); });
  CHECK(stats[0].bucket_bytes >= 2 * 64 * 65 * 4);
}

TEST_CASE("a negative stats_every is refused", "[ranks][stats]") {
  const auto errors = errors_of_ranks(1, [](const Rank& self) { train(self, 1, /*every=*/-1); });
  CHECK_THAT(errors[0], ContainsText("stats_every") && ContainsText("-1"));
}

TEST_CASE("steps are sampled with their buckets' times in order", "[ranks][stats]") {
  const auto stats =
      run_ranks<ReductionStats>(2, [](const Rank& self) { return train(self, 12, /*every=*/6); });
  for (int rank = 0; rank < 2; ++rank) {
    const auto& steps = stats[rank].steps;
    REQUIRE(steps.size() == 11);  // the first ten, and the twelfth
    CHECK(steps.back().step == 12);
    CHECK(stats[rank].rebuilds == 1);
    CHECK(stats[rank].rebuilt_at == 2);
    for (const auto& step : steps) {
      CHECK(step.rank == rank);
      CHECK(step.bytes == 2 * 64 * 65 * 4);
      CHECK(0 < step.forward_ms);
      CHECK(step.forward_ms <= step.compute_ms);
      CHECK(step.compute_ms <= step.total_ms);
      CHECK(step.exposed_ms <= step.communication_ms);
      CHECK(step.communication_ms <= step.total_ms);
      REQUIRE(step.buckets.size() >= 2);
      double before = 0;
      for (const auto& bucket : step.buckets) {
        CHECK(bucket.ready_ms >= step.forward_ms);
        CHECK(bucket.ready_ms <= bucket.launched_ms);
        CHECK(bucket.launched_ms < bucket.done_ms);
        CHECK(bucket.launched_ms >= before);
        CHECK(bucket.done_ms <= step.total_ms);
        before = bucket.launched_ms;
      }
    }
    CHECK(steps.front().step_ms == 0);
    CHECK(steps[1].step_ms >= steps[1].total_ms);
  }
}

namespace {

/// The statistics of ranks of which one sleeps in a part of each step.
std::vector<ReductionStats> train_beside_sleeper(
    int sleeper, const std::string& part, std::chrono::milliseconds pause) {
  return run_ranks<ReductionStats>(3, [&](const Rank& self) {
    const auto a = torch::ones({3}).set_requires_grad(true);
    Reducer reducer({{"a", a}}, self.group);
    const auto pause_in = [&](const char* now) {
      const bool is_slow = self.rank == sleeper && part == now;
      std::this_thread::sleep_for(is_slow ? pause : std::chrono::milliseconds(1));
    };
    for (int step = 0; step < 24; ++step) {
      pause_in("data");
      reducer.prepare_for_forward();
      auto loss = (a * 2).sum();
      pause_in("forward");
      reducer.prepare_for_backward({{loss}, true});
      loss.register_hook([&](const at::Tensor&) { pause_in("backward"); });
      loss.backward();
    }
    return reducer.stats();
  });
}

}  // namespace

TEST_CASE("a rank that takes longer is named with its part of a step", "[ranks][stats]") {
  const std::string slow_part = GENERATE("data", "forward", "backward");
  // Other work of the machine makes the other ranks late, too; at last not as late as this one.
  std::vector<ReductionStats> stats;
  for (int pause = 30; pause <= 480; pause *= 2) {
    stats = train_beside_sleeper(1, slow_part, std::chrono::milliseconds(pause));
    if (stats[0].stragglers.size() == 1) break;
  }
  for (const auto& of_rank : stats) {
    REQUIRE(of_rank.stragglers.size() == 1);
    CHECK(of_rank.stragglers[0].rank == 1);
    CHECK(of_rank.stragglers[0].what == slow_part);
    CHECK(of_rank.stragglers[0].factor > 2);
    CHECK(of_rank.stragglers[0].factor == stats[0].stragglers[0].factor);
  }
}

TEST_CASE("the time between steps counts as data, without known optimizers", "[pure][stats]") {
  StepRecorder recorder(/*rank=*/0, /*every=*/1);
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
  const auto step = [&](int64_t number) {
    recorder.begin_forward(number);
    recorder.armed(0);
    recorder.begin_backward();
    recorder.autograd_done();
    recorder.end_pass(false);
  };
  step(1);
  pause();
  step(2);
  {
    const OptimizerTime::Scope outer;
    const OptimizerTime::Scope inner;
    pause();
  }
  step(3);
  const auto steps = recorder.steps();
  REQUIRE(steps.size() == 3);
  CHECK(steps[0].data_ms == 0);
  CHECK(steps[1].data_ms >= 20);
  CHECK(steps[1].data_ms == Approx(steps[1].step_ms - steps[1].total_ms));
  CHECK(steps[2].step_ms - steps[2].total_ms - steps[2].data_ms >= 20);
  CHECK(steps[2].data_ms >= 0);
}

TEST_CASE("communication is within and between hosts", "[ranks][many][stats]") {
  const auto run = [](const char* backend, int ranks) {
    return run_ranks<ReductionStats>(
        ranks, testing::over(backend), [](const Rank& self) { return train(self, 3, 1); });
  };
  for (const auto& of_rank : run("shm", 2)) {
    for (const auto& step : of_rank.steps) {
      CHECK(step.inter_host_ms == 0);
      CHECK(step.intra_host_ms == step.communication_ms);
    }
  }
  // A leader knows the time of its collectives between hosts; the others of its host know none.
  const auto times = run_ranks<double>(4, testing::over("two_hosts"), [](const Rank& self) {
    const auto backend = self.group->getBackend(at::kCPU);
    const auto* timer = dynamic_cast<const InterHostTimer*>(backend.get());
    TORCH_CHECK(timer != nullptr, "no timer");
    const auto before = timer->inter_host_ms();
    std::vector<at::Tensor> tensors{torch::ones({1000})};
    backend->allreduce(tensors)->wait();
    const auto after = timer->inter_host_ms();
    TORCH_CHECK(before.value_or(0) == 0, "timed before the first collective");
    return after.value_or(-1);
  });
  CHECK(times[0] > 0);
  CHECK(times[1] == -1);
  CHECK(times[2] > 0);
  CHECK(times[3] == -1);
}

TEST_CASE("a step's communication is split by the time between hosts", "[pure][stats]") {
  double between_ms = 100;
  const auto split_of = [&](double more_ms) {
    StepRecorder recorder(0, 1, 0, {}, [&] { return between_ms; });
    recorder.begin_forward(1);
    recorder.armed(1);
    recorder.begin_backward();
    recorder.launching(0, 8);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    recorder.autograd_done();
    between_ms += more_ms;
    recorder.reduced(0);
    recorder.end_pass(false);
    return recorder.steps().at(0);
  };
  const auto some = split_of(2);
  CHECK(some.inter_host_ms == Approx(2));
  CHECK(some.intra_host_ms == Approx(some.communication_ms - 2));
  const auto all = split_of(1e6);
  CHECK(all.inter_host_ms == all.communication_ms);
  CHECK(all.intra_host_ms == 0);
}

TEST_CASE("a graph is static while passes use the same parameters", "[ranks][stats]") {
  const auto stats = run_ranks<std::vector<char>>(2, [](const Rank& self) {
    const auto a = torch::ones({3}).set_requires_grad(true);
    const auto b = torch::ones({3}).set_requires_grad(true);
    Reducer reducer(
        {{"a", a}, {"b", b}}, self.group, ReducerOptions().find_unused_parameters(true));
    std::vector<char> is_static{reducer.stats().can_set_static_graph};
    for (const bool uses_b : {true, true, false, true}) {
      reducer.prepare_for_forward();
      const auto loss = uses_b ? (a + b).sum() : a.sum();
      reducer.prepare_for_backward({{loss}, true});
      loss.backward();
      is_static.push_back(reducer.stats().can_set_static_graph);
    }
    return is_static;
  });
  CHECK(stats[0] == std::vector<char>{0, 1, 1, 0, 0});
}

TEST_CASE("what is counted becomes a rate of the last passes", "[pure][stats]") {
  Rate rate;
  CHECK_FALSE(rate.is_counted());
  rate.count(5);
  rate.end_pass(10);
  CHECK(rate.per_second() == 0);
  for (int pass = 1; pass <= 200; ++pass) {
    rate.count(pass > 50 ? 64 : 1);
    rate.end_pass(10 + pass * 0.5);
  }
  CHECK(rate.is_counted());
  CHECK(rate.per_second() == Approx(128));
}

TEST_CASE("samples that are counted become a rate", "[ranks][stats]") {
  const auto rates = run_ranks<std::vector<double>>(2, [](const Rank& self) {
    const auto a = torch::ones({3}).set_requires_grad(true);
    Reducer reducer({{"a", a}}, self.group, ReducerOptions());
    const auto begin = std::chrono::steady_clock::now();
    for (int pass = 0; pass < 4; ++pass) {
      if (self.rank == 0) reducer.count_trained(1000);
      reducer.prepare_for_forward();
      const auto loss = a.sum();
      reducer.prepare_for_backward({{loss}, true});
      loss.backward();
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    return std::vector<double>{reducer.stats().trained_per_second, 3000 / took.count()};
  });
  CHECK(rates[0][0] >= rates[0][1]);  // between the ends of four passes
  CHECK(rates[1][0] == 0);
}

TEST_CASE("memory's peak covers what was freed", "[ranks][stats]") {
  const auto had = run_ranks<int64_t>(1, [](const Rank&) {
    const auto large = torch::ones({int64_t{64} << 20});
    return resident_bytes();
  });
  const auto stats =
      run_ranks<ReductionStats>(1, [](const Rank& self) { return train(self, 1, /*every=*/1); });
  CHECK(had[0] > int64_t{256} << 20);
  CHECK(stats[0].peak_host_bytes > had[0] / 10 * 9);  // the kernel counts what is resident in steps
  CHECK(stats[0].peak_device_bytes == 0);
}

// The program that the test after it starts.
TEST_CASE("memory's peak is below a large parent's", "[.peak]") {
  const auto of_parent = c10::utils::get_env("DDP_OF_PARENT");
  if (!of_parent) return;  // a list that leaves tags out has hidden cases, too
  const auto stats =
      run_ranks<ReductionStats>(1, [](const Rank& self) { return train(self, 1, /*every=*/1); });
  CHECK(stats[0].peak_host_bytes < std::stoll(*of_parent) / 4 * 3);
}

TEST_CASE("memory's peak is of this process, not of a parent", "[process][stats]") {
  const auto large = torch::ones({int64_t{64} << 20});
  std::string program = "/proc/self/exe", test = "[.peak]";
  char* arguments[] = {program.data(), test.data(), nullptr};
  c10::utils::set_env("DDP_OF_PARENT", std::to_string(resident_bytes()).c_str());
  pid_t child = 0;
  REQUIRE(::posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ) == 0);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("without the times of all ranks no rank is slow", "[ranks][stats]") {
  const auto stats = run_ranks<ReductionStats>(
      2, [](const Rank& self) { return train(self, 22, /*every=*/self.rank == 0 ? 0 : 1); });
  CHECK(stats[0].stragglers.empty());
  CHECK(stats[1].stragglers.empty());
}

TEST_CASE("stats_every(0) measures nothing, and one rank has no communication", "[ranks][stats]") {
  const auto off =
      run_ranks<ReductionStats>(2, [](const Rank& self) { return train(self, 3, /*every=*/0); });
  CHECK(off[0].steps.empty());
  const auto alone =
      run_ranks<ReductionStats>(1, [](const Rank& self) { return train(self, 10, /*every=*/1); });
  REQUIRE(alone[0].steps.size() == 10);
  // The least of them: another process may take the core in the middle of a step.
  double least = 1;
  for (const auto& step : alone[0].steps) least = std::min(least, step.communication_ms);
  CHECK(least < 0.1);
  CHECK(summary(ReductionStats{}).empty());
}

TEST_CASE("overlapping reductions count once, and after autograd as exposed", "[pure][stats]") {
  StepRecorder recorder(/*rank=*/3, /*every=*/1);
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
  recorder.begin_forward(1);
  recorder.armed(2);
  recorder.begin_backward();
  recorder.bucket_ready(0);
  recorder.launching(0, 100);
  pause();
  recorder.bucket_ready(1);
  recorder.launching(1, 50);
  pause();
  recorder.reduced(0);
  recorder.autograd_done();
  pause();
  recorder.reduced(1);
  recorder.reduced(1);
  recorder.end_pass(false);
  const auto steps = recorder.steps();
  REQUIRE(steps.size() == 1);
  const auto& step = steps[0];
  CHECK(step.rank == 3);
  CHECK(step.bytes == 150);
  // From the first launch to the last end.
  const double under_way = step.buckets[1].done_ms - step.buckets[0].launched_ms;
  CHECK(step.communication_ms == Approx(under_way));
  CHECK(step.exposed_ms == Approx(step.buckets[1].done_ms - step.compute_ms));
  CHECK(step.overlap() == Approx(1 - step.exposed_ms / under_way));

  recorder.begin_forward(2);
  recorder.armed(1);
  recorder.begin_backward();
  recorder.end_pass(true);
  recorder.end_pass(false);
  CHECK(recorder.steps().size() == 1);
}

TEST_CASE("a summary is one line of medians", "[pure][stats]") {
  CHECK(
      summary({{step_of(80, 40, 20), step_of(80, 40, 20), step_of(70, 40, 0)}}) ==
      "step 100.0 ms, communication 40.0 ms (40% of the step, 20% not hidden), overlap 0.50; "
      "communication is fair (20% to 40%), overlap is low (up to 0.7), backward takes 80%");
  CHECK(
      summary({{step_of(90, 40, 10)}}) ==
      "step 100.0 ms, communication 40.0 ms (40% of the step, 10% not hidden), overlap 0.75; "
      "communication is fair (20% to 40%), overlap is good (above 0.7), backward takes 90%");
  CHECK_THAT(
      summary({{step_of(90, 19, 10)}}), ContainsText("communication is good (below 20%), overlap"));
  CHECK_THAT(summary({{step_of(90, 41, 10)}}), ContainsText("look at communication (above 40%)"));
  auto with_forward = step_of(90, 40, 10);
  with_forward.forward_ms = 30;
  CHECK_THAT(summary({{with_forward}}), ContainsText("backward takes 60%"));
  ReductionStats slow{{step_of(90, 40, 10)}};
  slow.stragglers = {{3, "data", 1.315}};
  CHECK_THAT(
      summary(slow), ContainsText("takes 90%; rank 3 is slow in data (1.31 times)") ||
                         ContainsText("takes 90%; rank 3 is slow in data (1.32 times)"));
}

TEST_CASE("a summary covers the steps with the current buckets", "[pure][stats]") {
  ReductionStats stats;
  for (int64_t step = 1; step <= 5; ++step) {
    stats.steps.push_back(step < 5 ? step_of(80, 40, 40) : step_of(80, 40, 4));
    stats.steps.back().step = step;
  }
  CHECK_THAT(summary(stats), ContainsText("step 120.0 ms"));
  stats.rebuilt_at = 4;
  CHECK_THAT(summary(stats), ContainsText("step 84.0 ms") && ContainsText("overlap 0.90"));
  stats.rebuilt_at = 5;  // no step since the rebuild: all steps count
  CHECK_THAT(summary(stats), ContainsText("step 120.0 ms"));
}

TEST_CASE("a summary has the tuned cap, and its times if they are known", "[pure][stats]") {
  ReductionStats stats{{step_of(80, 40, 20)}};
  stats.tuning.emplace();
  stats.tuning->cap_mb = 5;
  const std::string tuned = "; bucket_cap_mb tuned to 5";
  CHECK_THAT(summary(stats), Catch::Matchers::EndsWith(tuned));
  stats.tuning->measured_ms = 100;
  CHECK_THAT(summary(stats), Catch::Matchers::EndsWith(tuned + ": step measured 100.0 ms"));
  stats.tuning->predicted_ms = 90.04;
  CHECK_THAT(
      summary(stats),
      Catch::Matchers::EndsWith(tuned + ": step predicted 90.0 ms, measured 100.0 ms"));
}

TEST_CASE("all_gather_stats gathers the steps of all ranks for a trace", "[ranks][stats]") {
  const auto traces = run_ranks<std::string>(2, [](const Rank& self) {
    const auto all = all_gather_stats(train(self, 2, 1), self.group);
    TORCH_CHECK(all.steps.size() == 4 && all.steps[0].rank == 0 && all.steps[3].rank == 1);
    TORCH_CHECK(all.steps[3].buckets.size() >= 2 && all.steps[3].buckets[0].done_ms > 0);
    const TemporaryFolder folder;
    const auto path = folder.file("trace.json");
    write_trace(path, all);
    return read_bytes(path);
  });
  CHECK(traces[0] == traces[1]);
  CHECK_THAT(traces[0], ContainsText(R"("name":"rank 0")") && ContainsText(R"("name":"rank 1")"));
  CHECK_THAT(traces[0], ContainsText(R"("name":"bucket 1")") && ContainsText(R"("ph":"X")"));
  for (const char* rank : {"0", "1"}) {
    CHECK_THAT(
        traces[0], ContainsText(c10::str(
                       R"({"ph":"M","name":"thread_name","pid":)", rank,
                       R"(,"tid":2,"args":{"name":"bucket 1"}})")));
  }
  // Balanced braces, and no comma too many: an approximation without a JSON parser.
  CHECK(
      std::count(traces[0].begin(), traces[0].end(), '{') ==
      std::count(traces[0].begin(), traces[0].end(), '}'));
  CHECK(traces[0].find(",\n]") == std::string::npos);
}

TEST_CASE("a trace that cannot be written is an error", "[pure][stats]") {
  CHECK_THROWS_WITH(
      write_trace("/nowhere/at/all.json", ReductionStats{}),
      ContainsText("expected to write /nowhere/at/all.json"));
}

}  // namespace ddp
