// Measures steps of DiLoCo beside steps that send nothing. It is meant for a slow link:
//
//     scripts/bench_link.sh --diloco 0.1
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "in_turns.h"
#include "linear_layers.h"
#include "micro.h"

namespace {

/// A net of its own, which each rank, a region, trains alone.
struct Region {
  torch::nn::Sequential net;
  torch::optim::SGD optimizer;
  ddp::DiLoCoOptions options = {};
  std::unique_ptr<ddp::DiLoCo> diloco = nullptr;  // null: sends nothing
  std::vector<double> sent = {};                  // when each exchange began, in seconds

  void step(int64_t number, const torch::Tensor& input) {
    optimizer.zero_grad();
    net->forward(input).square().mean().backward();
    optimizer.step();
    if (!diloco) return;
    if (sends_after(number)) sent.push_back(now());
    diloco->average_parameters(net->parameters());
  }

 private:
  bool sends_after(int64_t number) const {
    for (int64_t f = 1; f <= options.fragments(); ++f) {
      if (number == options.sync_every() * f / options.fragments()) return true;
    }
    return false;
  }

  /// By a clock that the processes of a host share.
  static double now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(time).count();
  }
};

/// How long this region's exchanges have waited for the other region to begin them.
double seconds_apart(const Region& region) {
  const auto own = torch::tensor(region.sent, torch::kDouble);
  const auto last = ddp::all_reduce(own.clone(), c10d::ReduceOp::MAX);
  return (last - own).sum().item<double>();
}

struct Kind {
  const char* name;
  ddp::DiLoCoOptions options;
};

void measure_diloco(int64_t width, int64_t sync_every, int rounds) {
  ddp::init_process_group(ddp::ProcessGroupOptions().backend("gloo"));
  constexpr int64_t kLayers = 4;
  const auto input = torch::randn({32, width});
  const auto fragments = ddp::DiLoCoOptions().fragments(4).overlap(5);
  const Kind kinds[] = {
      {"bfloat16", ddp::DiLoCoOptions()},
      {"int8", ddp::DiLoCoOptions().wire(ddp::DiLoCoWire::Int8)},
      {"4 fragments, overlap 5, bfloat16", fragments},
      {"4 fragments, overlap 5, int8", ddp::DiLoCoOptions(fragments).wire(ddp::DiLoCoWire::Int8)}};
  const auto make_region = [&] {
    auto net = benchmarks::make_linear_layers(kLayers, width);
    torch::optim::SGD optimizer(net->parameters(), 1e-3);
    return std::make_shared<Region>(Region{std::move(net), std::move(optimizer)});
  };
  std::vector<benchmarks::Way> ways;
  std::vector<std::shared_ptr<Region>> regions;
  const auto add_way = [&](const char* name, std::shared_ptr<Region> region) {
    regions.push_back(region);
    ways.push_back({name, [region, input, sync_every] {
                      ddp::barrier();
                      return benchmarks::milliseconds([&] {
                               for (int64_t i = 1; i <= sync_every; ++i) region->step(i, input);
                               // Waits for what would go on in the next round.
                               if (region->diloco) region->diloco->finish();
                               // One region may be slower by other work, whatever it sends.
                               ddp::barrier();
                             }) /
                             static_cast<double>(sync_every);
                    }});
  };
  add_way("no exchange", make_region());
  for (const auto& kind : kinds) {
    auto region = make_region();
    auto options = kind.options;
    options.sync_every(sync_every).regions(ddp::default_group());
    region->options = options;
    region->diloco = std::make_unique<ddp::DiLoCo>(region->net->parameters(), options);
    add_way(kind.name, std::move(region));
  }
  benchmarks::run_in_turns(ways, /*warm_up=*/0, rounds);
  std::vector<double> apart{0};
  for (size_t i = 1; i < ways.size(); ++i) apart.push_back(seconds_apart(*regions[i]));
  // Each region prints its own: the one that comes first waits for the other.
  std::printf("region %d: ", ddp::get_rank());
  benchmarks::print_linear_layers(kLayers, width);
  benchmarks::print_ways("H = " + std::to_string(sync_every), "ms a step", ways);
  std::printf(
      "%-34s %12s %12s %12s %12s\n", "a round", "MB", "s exchanged", "s for other", "s waited");
  for (size_t i = 1; i < ways.size(); ++i) {
    const auto stats = regions[i]->diloco->stats();
    std::printf(
        "%-34s %12.2f %12.3f %12.3f %12.3f\n", ways[i].name.c_str(),
        static_cast<double>(stats.bytes_sent) / 1e6 / rounds, stats.seconds_sent / rounds,
        apart[i] / rounds, stats.seconds_waited / rounds);
  }
}

}  // namespace

void benchmarks::add_diloco(CLI::App& app) {
  auto* command = app.add_subcommand(
      "diloco", "Time of a step of regions of one rank each, beside one that sends nothing.");
  static int64_t width = 1024;
  static int64_t sync_every = 500;
  static int rounds = 2;
  command->add_option("--width", width, "Of the 4 linear layers")->check(CLI::Range(1L, 100000L));
  command->add_option("--sync-every", sync_every, "Steps a round")->check(CLI::Range(4L, 1000000L));
  command->add_option("--rounds", rounds, "Rounds of each")->check(CLI::Range(1, 1000000));
  command->callback([] { measure_diloco(width, sync_every, rounds); });
}
