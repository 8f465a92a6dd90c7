// A step with each communication hook, and what it sends. Over a slow link is where hooks are for:
//
//     scripts/bench_link.sh --hooks 1
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ddp/comm_hooks.h>
#include <ddp/ddp.h>
#include <CLI/CLI.hpp>

#include "linear_layers.h"
#include "median.h"

namespace {

namespace hooks = ddp::hooks;

struct Way {
  std::string name;
  ddp::DistributedDataParallel<torch::nn::Sequential> model;
  std::vector<double> times = {}, ratios = {}, megabytes = {};
};

/// What this host has sent so far over the interface that Gloo was told to use; 0 without one.
double sent_megabytes() {
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (!interface) return 0;
  std::ifstream file("/sys/class/net/" + std::string(interface) + "/statistics/tx_bytes");
  double bytes = 0;
  file >> bytes;
  return bytes / 1e6;
}

hooks::PowerSGDOptions of_rank(int64_t rank) {
  return hooks::PowerSGDOptions().matrix_approximation_rank(rank).start_iter(2);
}

std::vector<Way> make_ways(int64_t layers, int64_t width) {
  const std::vector<std::pair<std::string, ddp::CommHook>> all = {
      {"all_reduce", hooks::all_reduce()},
      {"fp16_compress", hooks::fp16_compress()},
      {"bf16_compress", hooks::bf16_compress()},
      {"PowerSGD, rank 1", hooks::power_sgd(of_rank(1))},
      {"PowerSGD, rank 4", hooks::power_sgd(of_rank(4))},
      {"PowerSGD, rank 4, bf16", hooks::bf16_compress_wrapper(hooks::power_sgd(of_rank(4)))},
      {"TopK, 1%", hooks::top_k(hooks::TopKOptions().ratio(0.01))},
      {"noop", hooks::noop()},
  };
  std::vector<Way> ways;
  for (const auto& [name, hook] : all) {
    ways.push_back(
        {name, ddp::DistributedDataParallel<torch::nn::Sequential>(
                   benchmarks::make_linear_layers(layers, width))});
    ways.back().model->register_comm_hook(hook);
  }
  return ways;
}

void step(Way& way, const at::Tensor& input, bool counts) {
  ddp::barrier();
  const auto before = sent_megabytes();
  const auto start = std::chrono::steady_clock::now();
  way.model->zero_grad();
  way.model->forward(input).square().mean().backward();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  ddp::barrier();
  if (!counts) return;
  way.times.push_back(took.count());
  way.megabytes.push_back(sent_megabytes() - before);
}

}  // namespace

int main(int argc, char** argv) {
  int64_t layers = 25;
  int64_t width = 1000;
  int rounds = 7;
  std::string backend;
  CLI::App app("Forward and backward passes with each communication hook.");
  app.add_option("--layers", layers, "Of the model")->check(CLI::Range(1, 10000));
  app.add_option("--width", width, "Of each layer")->check(CLI::Range(1, 100000));
  app.add_option("--rounds", rounds, "Steps of each, in turns")->check(CLI::Range(1, 1000000));
  app.add_option("--backend", backend, "gloo or shm; empty: the best there is");
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  ddp::init_process_group(ddp::ProcessGroupOptions().backend(backend));
  {
    auto ways = make_ways(layers, width);
    const auto input = torch::randn({8, width});
    for (int round = -3; round < rounds; ++round) {  // the first ones rebuild and begin to compress
      for (size_t i = 0; i < ways.size(); ++i) {
        step(ways[round % 2 == 0 ? i : ways.size() - 1 - i], input, round >= 0);
      }
      if (round < 0) continue;
      for (auto& way : ways) way.ratios.push_back(way.times.back() / ways[0].times.back());
    }
    if (ddp::get_rank() == 0) {
      std::printf(
          "%-24s %10s %10s %10s   %.1f million parameters, %d ranks\n", "", "ms a step", "ratio",
          "MB sent", static_cast<double>(layers * width * (width + 1)) / 1e6,
          ddp::get_world_size());
      for (const auto& way : ways) {
        std::printf(
            "%-24s %10.1f %10.3f %10.2f\n", way.name.c_str(), benchmarks::median(way.times),
            benchmarks::median(way.ratios), benchmarks::median(way.megabytes));
      }
    }
  }
  ddp::destroy_process_group();
  return 0;
}
