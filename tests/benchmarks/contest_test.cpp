#include "benchmarks/ddp_bench/contest.h"

#include <chrono>
#include <ctime>
#include <numeric>
#include <thread>
#include <utility>

#include <ddp/collectives.h>
#include <torch/torch.h>

#include "benchmarks/ddp_bench/engines/modes.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;
using ddp_bench::Agreement;
using ddp_bench::Contestant;
using ddp_bench::Engine;
using ddp_bench::Messages;
using ddp_bench::Task;

/// A mode with wrong results: `spoil` changes its gradients.
class Wrong : public Engine {
 public:
  using Spoil = std::function<void(at::Tensor& gradient)>;
  Wrong(Task task, Spoil spoil) : Engine(std::move(task)), spoil_(std::move(spoil)) {}
  Messages messages() const override { return {{1}}; }

 protected:
  void after_backward() override {
    for (const auto& p : parameters()) spoil_(p.mutable_grad());
  }

 private:
  Spoil spoil_;
};

class Line : public ddp_bench::Net {
 public:
  Line() : fc_(register_module("fc", torch::nn::Linear(1, 1))) {}
  at::Tensor forward(const at::Tensor& x) override { return fc_(x); }

 private:
  torch::nn::Linear fc_;
};

// The same parameters on all ranks, and different data.
Task tiny_task(int rank) {
  const auto net = std::make_shared<Line>();
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.fill_(0.5);
  return {
      net, torch::full({1, 1}, rank + 1.0), torch::full({1, 1}, 0.25),
      [](const at::Tensor& y, const at::Tensor& target) { return at::mse_loss(y, target); }};
}

Contestant contestant(const std::string& mode, const Rank& self) {
  auto options = ddp::DistributedDataParallelOptions().process_group(self.group);
  return {
      mode,
      {},
      ddp_bench::find_mode(mode).communicates,
      ddp_bench::make_engine(mode, tiny_task(self.rank), options)};
}

Contestant wrong(const Rank& self, Wrong::Spoil spoil) {
  return {"wrong", {}, true, std::make_unique<Wrong>(tiny_task(self.rank), std::move(spoil))};
}

std::string outcome(std::vector<Contestant> contestants, const Rank& self, bool bitwise) {
  compete(contestants, {/*iters=*/2, /*rounds=*/1, /*warmup=*/3}, self.group);
  const auto agreement = bitwise ? Agreement::Bitwise : Agreement::Rounded;
  return check_parameters(contestants, tiny_task(0).net->parameters(), self.group, agreement);
}

std::vector<Contestant> two(Contestant first, Contestant second) {
  std::vector<Contestant> contestants;
  contestants.push_back(std::move(first));
  contestants.push_back(std::move(second));
  return contestants;
}

/// Writes its name into a log in every step.
class Logging : public Engine {
 public:
  Logging(std::string name, std::string& log)
      : Engine(tiny_task(0)), name_(std::move(name)), log_(log) {}
  Messages messages() const override { return {{2}}; }

 protected:
  void after_backward() override { log_ += name_; }

 private:
  std::string name_;
  std::string& log_;
};

}  // namespace

TEST_CASE("all modes end with the same parameters", "[benchmarks][ranks]") {
  const int size = GENERATE(1, 2, 3);
  CAPTURE(size);
  const auto verdicts = run_ranks<std::string>(size, [](const Rank& self) {
    std::vector<Contestant> contestants;
    for (const auto& mode : ddp_bench::modes()) contestants.push_back(contestant(mode.name, self));
    return outcome(std::move(contestants), self, self.size <= 2);
  });
  for (const auto& verdict : verdicts) CHECK(verdict.empty());
}

TEST_CASE("a mode that does not average is detected", "[benchmarks][ranks][errors]") {
  const auto verdicts = run_ranks<std::string>(2, [](const Rank& self) {
    return outcome(two(contestant("ddp", self), wrong(self, [](at::Tensor&) {})), self, true);
  });
  CHECK_THAT(verdicts, Each(ContainsText("mode wrong: expected the same parameters on all ranks")));
}

TEST_CASE("a mode that averages wrongly is detected", "[benchmarks][ranks][errors]") {
  const int size = GENERATE(2, 3);
  CAPTURE(size);
  const auto verdicts = run_ranks<std::string>(size, [](const Rank& self) {
    const auto sum = [&](at::Tensor& gradient) {
      ddp::all_reduce(gradient, c10d::ReduceOp::SUM, self.group);
    };
    return outcome(two(contestant("ddp", self), wrong(self, sum)), self, self.size <= 2);
  });
  CHECK_THAT(
      verdicts, Each(ContainsText("mode wrong: expected the parameters that mode ddp ended with")));
}

TEST_CASE("modes take turns in alternating order, and steps are timed", "[benchmarks][ranks]") {
  struct Seen {
    std::string log;
    size_t steps = 0, sends = 0, sends_of_silent = 0;
    std::vector<double> round_step_ms, round_cpu_ms;
  };
  const auto seen = run_ranks<Seen>(1, [](const Rank& self) {
    Seen result;
    std::vector<Contestant> contestants =
        two({"a", {}, true, std::make_unique<Logging>("a", result.log)},
            {"b", {}, false, std::make_unique<Logging>("b", result.log)});
    compete(contestants, {/*iters=*/2, /*rounds=*/3, /*warmup=*/1}, self.group);
    result.steps = contestants[0].step_ms.size();
    result.sends = contestants[0].comm_ms.size();
    result.sends_of_silent = contestants[1].comm_ms.size();
    result.round_step_ms = contestants[0].round_step_ms;
    result.round_cpu_ms = contestants[0].round_cpu_ms;
    return result;
  });
  CHECK(
      seen[0].log ==
      "ab"
      "aaabbb"  // the first step of a turn is not timed
      "bbbaaa"
      "aaabbb");
  CHECK(seen[0].steps == 6);
  CHECK(seen[0].sends == 6);  // at least two in a turn
  CHECK(seen[0].sends_of_silent == 0);
  CHECK(seen[0].round_step_ms.size() == 3);
  CHECK(seen[0].round_cpu_ms.size() == 3);
}

namespace {

/// Computes on its own thread in every step, for a given time.
class Busy : public Engine {
 public:
  explicit Busy(std::chrono::milliseconds cpu_time) : Engine(tiny_task(0)), cpu_time_(cpu_time) {}
  Messages messages() const override { return {}; }

 protected:
  void after_backward() override {
    std::thread([this] {
      timespec end{};
      do {
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
      } while (end.tv_sec == 0 && end.tv_nsec < std::chrono::nanoseconds(cpu_time_).count());
    }).join();
  }

 private:
  std::chrono::milliseconds cpu_time_;
};

}  // namespace

TEST_CASE("CPU time counts all threads, for each step, by round", "[benchmarks][ranks]") {
  using std::chrono::milliseconds;
  const auto of_ranks = run_ranks<std::vector<double>>(1, [](const Rank& self) {
    std::vector<Contestant> contestants =
        two({"idle", {}, false, std::make_unique<Busy>(milliseconds(0))},
            {"busy", {}, false, std::make_unique<Busy>(milliseconds(20))});
    compete(contestants, {/*iters=*/3, /*rounds=*/2, /*warmup=*/1}, self.group);
    return contestants[1].round_cpu_ms;
  });
  REQUIRE(of_ranks[0].size() == 2);
  for (const double cpu_ms : of_ranks[0]) {
    CHECK(cpu_ms >= 20);
    CHECK(cpu_ms < 60);  // not that of all three steps
  }
}

TEST_CASE("CPU time is the mean of the ranks", "[benchmarks][ranks]") {
  const auto of_ranks = run_ranks<std::vector<double>>(2, [](const Rank& self) {
    std::vector<Contestant> contestants;
    contestants.push_back(contestant("none", self));
    compete(contestants, {/*iters=*/2, /*rounds=*/2, /*warmup=*/3}, self.group);
    return contestants[0].round_cpu_ms;
  });
  CHECK(of_ranks[0] == of_ranks[1]);
}

TEST_CASE("messages are the buckets' sizes", "[benchmarks][ranks]") {
  const auto sizes = run_ranks<std::vector<std::vector<int64_t>>>(2, [](const Rank& self) {
    std::vector<std::vector<int64_t>> sizes;
    const auto options =
        ddp::DistributedDataParallelOptions().process_group(self.group).bucket_cap_mb(0.25);
    for (const char* mode : {"c10d", "ddp", "flat", "naive", "none"}) {
      const auto engine =
          ddp_bench::make_engine(mode, ddp_bench::make_task("small_params", 1, self.rank), options);
      if (std::string(mode) != "naive") {
        for (int step = 0; step < 3; ++step) engine->step();
      }
      sizes.push_back(engine->messages().elements);
    }
    return sizes;
  });
  constexpr int64_t kElements = 224000;
  const auto sum = [](const std::vector<int64_t>& of) {
    return std::accumulate(of.begin(), of.end(), int64_t{0});
  };
  for (const auto& of_rank : sizes) {
    CHECK(of_rank[0].size() == 4);  // 896,000 bytes by 262,144
    CHECK(of_rank[0] == of_rank[1]);
    CHECK(sum(of_rank[1]) == kElements);
    CHECK(of_rank[2] == std::vector<int64_t>{kElements});
    CHECK(of_rank[3].size() == 800);
    CHECK(sum(of_rank[3]) == kElements);
    CHECK(of_rank[4].empty());
  }
}
