// What Elastic adds to a healthy training step: the boundary between two turns, and step(). In a
// network namespace of its own it also shows what is sent, over shm nothing by the steps:
//
//     unshare -n sh -c 'ip link set lo up && ddprun --elastic -n 2 micro elastic'
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "in_turns.h"
#include "linear_layers.h"
#include "micro.h"

namespace {

constexpr int kEmptyTurns = 100000;

/// Of this thread, in microseconds.
double processor_time() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

/// That the loopback device has sent, in this network namespace.
int64_t loopback_packets() {
  std::ifstream devices("/proc/self/net/dev");
  for (std::string name; devices >> name;) {
    int64_t bytes = 0, packets = 0;
    if (name == "lo:" && devices >> bytes >> packets) return packets;
  }
  return 0;
}

/// The median of differences, and how far its interval of 95% reaches to each side.
void print_median(const char* what, std::vector<double> differences) {
  std::sort(differences.begin(), differences.end());
  const auto count = static_cast<double>(differences.size());
  const auto at = [&](double rank) {
    return differences[static_cast<size_t>(std::clamp(rank, 0.0, count - 1))];
  };
  const double reach = 0.98 * std::sqrt(count);
  std::printf(
      "%-34s %12.1f  (%.1f to %.1f, %zu pairs)\n", what, at(count / 2), at(count / 2 - reach),
      at(count / 2 + reach), differences.size());
}

class ElasticSteps {
 public:
  explicit ElasticSteps(int64_t width)
      : model_(benchmarks::make_linear_layers(4, width)),
        optimizer_(model_->parameters(), 1e-3),
        input_(torch::randn({32, width})) {
    run_.add("model", model_).add("optimizer", optimizer_).add("sampler", sampler_);
    run_.add("scaler", scaler_).add("loss", loss_);
    run_.enter();
  }
  ~ElasticSteps() { run_.finish(); }

  bool is_first() const { return run_.generation().rank == 0; }

  double plain() {
    return milliseconds_of([&] {
      backward();
      optimizer_.step();
    });
  }
  double in_turn() {
    return milliseconds_of([&] {
      run_.begin_turn();
      backward();
      run_.step(optimizer_);
    });
  }
  void empty_turn() {
    run_.begin_turn();
    run_.step([] {});
  }

 private:
  template <typename Body>
  static double milliseconds_of(const Body& body) {
    ddp::barrier();
    return benchmarks::milliseconds(body);
  }
  void backward() {
    optimizer_.zero_grad();
    model_->forward(input_).sum().backward();
  }

  ddp::Elastic run_{ddp::ElasticOptions().seed(1)};
  ddp::DistributedDataParallel<torch::nn::Sequential> model_;
  torch::optim::SGD optimizer_;
  ddp::DistributedSampler sampler_{1 << 20};
  ddp::GradScaler scaler_;
  double loss_ = 0;
  const torch::Tensor input_;
};

/// Prints what an empty turn takes, which is what Elastic adds to a step.
void measure_turns(ElasticSteps& steps, double step_us) {
  for (int i = 0; i < kEmptyTurns / 100; ++i) steps.empty_turn();
  const double start = processor_time();
  const double wall_us = 1e3 * benchmarks::milliseconds([&] {
                           for (int i = 0; i < kEmptyTurns; ++i) steps.empty_turn();
                         });
  const double own = (processor_time() - start) / kEmptyTurns;
  if (!steps.is_first()) return;
  std::printf(
      "%-34s %12.2f  (%.3f%% of a step)\n", "us of a processor, an empty turn", own,
      100 * own / step_us);
  std::printf("%-34s %12.2f\n", "us, an empty turn", wall_us / kEmptyTurns);
}

void measure_elastic(int64_t width, int steps, int rounds) {
  ElasticSteps elastic(width);
  // The second of the same shows what the machine makes of nothing.
  std::vector<benchmarks::Way> ways{
      {"a step", [&] { return elastic.plain(); }},
      {"in a turn", [&] { return elastic.in_turn(); }},
      {"a step once more", [&] { return elastic.plain(); }}};
  const auto before = loopback_packets();
  const double seconds = 1e-3 * benchmarks::milliseconds([&] {
                           benchmarks::run_in_turns(ways, /*warm_up=*/20, rounds * steps);
                         });
  const auto packets = static_cast<double>(loopback_packets() - before);
  const auto idle_before = loopback_packets();
  std::this_thread::sleep_for(std::chrono::seconds(5));
  const auto idle = static_cast<double>(loopback_packets() - idle_before);
  const auto added = [&](size_t way) {
    std::vector<double> differences;
    for (size_t i = 0; i < ways[0].times.size(); ++i) {
      differences.push_back(1e3 * (ways[way].times[i] - ways[0].times[i]));
    }
    return differences;
  };
  if (elastic.is_first()) {
    benchmarks::print_ways("4 x Linear, 5 parts", "ms", ways);
    print_median("us more in a turn", added(1));
    print_median("us more once more", added(2));
    std::printf(
        "%-34s %12.1f  (%.0f in %d steps)\n", "packets a second", packets / seconds, packets,
        3 * rounds * steps);
    std::printf("%-34s %12.1f\n", "packets a second, no steps", idle / 5);
  }
  measure_turns(elastic, 1e3 * benchmarks::median(ways[0].times));
}

}  // namespace

void benchmarks::add_elastic(CLI::App& app) {
  auto* command =
      app.add_subcommand("elastic", "Time of a training step in a turn of Elastic, and without.");
  static int64_t width = 512;
  static int steps = 5;
  static int rounds = 200;
  command->add_option("--width", width, "Of the 4 linear layers")->check(CLI::Range(1L, 100000L));
  command->add_option("--steps", steps, "Steps of each a round")->check(CLI::Range(1, 1000000));
  command->add_option("--rounds", rounds, "Rounds")->check(CLI::Range(1, 1000000));
  command->callback([] { measure_elastic(width, steps, rounds); });
}
