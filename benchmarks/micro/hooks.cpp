// Measures a step with each communication hook, and the bytes that it sends. Hooks are meant for a
// slow link:
//
//     scripts/bench_link.sh --hooks 1
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <ddp/comm_hooks.h>
#include <ddp/ddp.h>

#include "in_turns.h"
#include "linear_layers.h"
#include "micro.h"

namespace {

namespace hooks = ddp::hooks;

/// Megabytes sent so far over the interface in GLOO_SOCKET_IFNAME; 0 where it is not set.
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

std::vector<std::pair<std::string, ddp::CommHook>> all_hooks() {
  return {
      {"all_reduce", hooks::all_reduce()},
      {"fp16_compress", hooks::fp16_compress()},
      {"bf16_compress", hooks::bf16_compress()},
      {"int8_compress", hooks::int8_compress()},
      {"fp8_compress", hooks::fp8_compress()},
      {"PowerSGD, rank 1", hooks::power_sgd(of_rank(1))},
      {"PowerSGD, rank 4", hooks::power_sgd(of_rank(4))},
      {"PowerSGD, rank 4, bf16", hooks::bf16_compress_wrapper(hooks::power_sgd(of_rank(4)))},
      {"TopK, 1%", hooks::top_k(hooks::TopKOptions().ratio(0.01))},
      {"noop", hooks::noop()},
  };
}

void measure_hooks(int64_t layers, int64_t width, int rounds) {
  const auto input = torch::randn({8, width});
  const auto kinds = all_hooks();
  std::vector<std::vector<double>> megabytes(kinds.size());  // by hook and round
  std::vector<benchmarks::Way> ways;
  for (size_t i = 0; i < kinds.size(); ++i) {
    ddp::DistributedDataParallel model(benchmarks::make_linear_layers(layers, width));
    model->register_comm_hook(kinds[i].second);
    ways.push_back({kinds[i].first, [model, input, &sent = megabytes[i]]() mutable {
                      ddp::barrier();
                      const auto before = sent_megabytes();
                      const auto took = benchmarks::milliseconds([&] {
                        model->zero_grad();
                        model->forward(input).square().mean().backward();
                      });
                      ddp::barrier();
                      sent.push_back(sent_megabytes() - before);
                      return took;
                    }});
  }
  // In the first rounds the buckets are rebuilt, and compression starts.
  benchmarks::run_in_turns(ways, /*warm_up=*/3, rounds);
  if (ddp::get_rank() != 0) return;
  benchmarks::print_linear_layers(layers, width);
  benchmarks::print_ways("", "ms a step", ways);
  std::printf("%-34s %12s\n", "", "MB sent");
  for (size_t i = 0; i < ways.size(); ++i) {
    const std::vector<double> counted(megabytes[i].end() - rounds, megabytes[i].end());
    std::printf("%-34s %12.2f\n", ways[i].name.c_str(), benchmarks::median(counted));
  }
}

}  // namespace

void benchmarks::add_hooks(CLI::App& app) {
  auto* command =
      app.add_subcommand("hooks", "Forward and backward passes with each communication hook.");
  static int64_t layers = 25;
  static int64_t width = 1000;
  static int rounds = 7;
  static std::string backend;
  benchmarks::add_options_of_linear_layers(*command, layers, width);
  command->add_option("--rounds", rounds, "Steps of each, in turns")->check(CLI::Range(1, 1000000));
  command->add_option("--backend", backend, "gloo or shm; empty: the best there is");
  command->callback([] {
    ddp::init_process_group(ddp::ProcessGroupOptions().backend(backend));
    measure_hooks(layers, width, rounds);
    ddp::destroy_process_group();
  });
}
