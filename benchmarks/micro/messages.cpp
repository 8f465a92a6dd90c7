// Times messages between two ranks, over shared memory and over Gloo in turns.
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>
#include <ddp/collectives.h>
#include <ddp/process_group.h>

#include "groups.h"
#include "in_turns.h"
#include "micro.h"

namespace {

/// Rank 0 sends a tensor to rank 1, which sends it back; the others wait.
benchmarks::Way over(const std::string& name, const ddp::ProcessGroup& group, int64_t bytes) {
  const int messages = bytes > (1 << 20) ? 4 : 50;  // each way
  auto tensor = at::zeros({bytes / 4});
  return {name, [group, messages, tensor]() mutable {
            ddp::barrier(group);
            const auto rank = group->getRank();
            const auto round_trips = benchmarks::milliseconds([&] {
              for (int i = 0; i < messages && rank < 2; ++i) {
                if (rank == 0) ddp::send(tensor, 1, 0, group);
                ddp::recv(tensor, 1 - rank, 0, group);
                if (rank == 1) ddp::send(tensor, 0, 0, group);
              }
            });
            return 1000 * round_trips / (2 * messages);
          }};
}

void measure_messages(const std::vector<int64_t>& sizes, int rounds) {
  const auto shm = ddp::default_group();
  const auto gloo = benchmarks::gloo_beside(shm);
  for (const auto bytes : sizes) {
    std::vector<benchmarks::Way> ways{over("shm", shm, bytes), over("gloo", gloo, bytes)};
    benchmarks::run_in_turns(ways, /*warm_up=*/1, rounds);
    if (ddp::get_rank() != 0) continue;
    benchmarks::print_ways("message of " + std::to_string(bytes) + " bytes", "us one way", ways);
  }
}

}  // namespace

void benchmarks::add_messages(CLI::App& app) {
  auto* command = app.add_subcommand(
      "messages", "send and recv between two ranks, over shared memory and Gloo.");
  static int rounds = 15;
  static std::vector<int64_t> sizes{4 << 10, 1 << 20, 8 << 20};
  command->add_option("--rounds", rounds, "Of each, in turns")->check(CLI::Range(1, 1000000));
  command->add_option("--bytes", sizes, "Of the tensor, each 4 or more")
      ->check(CLI::Range(int64_t{4}, int64_t{1} << 40));
  command->callback([] {
    ddp::init_process_group(ddp::ProcessGroupOptions().backend("shm"));
    if (ddp::get_world_size() < 2) throw std::runtime_error("messages: start it with ddprun -n 2");
    measure_messages(sizes, rounds);
    ddp::destroy_process_group();
  });
}
