// Times the collectives from one tensor into one tensor, over shared memory and over Gloo in turns.
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ddp/collectives.h>
#include <ddp/process_group.h>

#include "groups.h"
#include "in_turns.h"
#include "micro.h"

namespace {

using Collective =
    std::function<void(at::Tensor& whole, at::Tensor& part, const ddp::ProcessGroup& group)>;

const std::vector<std::pair<std::string, Collective>>& collectives() {
  static const std::vector<std::pair<std::string, Collective>> all = {
      {"all_gather_into_tensor",
       [](auto& whole, auto& part, const auto& group) {
         ddp::all_gather_into_tensor(whole, part, group);
       }},
      {"reduce_scatter_tensor",
       [](auto& whole, auto& part, const auto& group) {
         ddp::reduce_scatter_tensor(part, whole, c10d::ReduceOp::SUM, group);
       }},
      {"all_to_all_single",
       [](auto& whole, auto& /*part*/, const auto& group) {
         auto received = at::empty_like(whole);
         ddp::all_to_all_single(received, whole, {}, {}, group);
       }},
  };
  return all;
}

benchmarks::Way over(
    const std::string& name, const Collective& collective, const ddp::ProcessGroup& group,
    int64_t bytes) {
  const int64_t part_numel = bytes / 4 / group->getSize();
  const int calls = bytes > (1 << 20) ? 2 : 50;
  auto part = at::ones({part_numel});
  auto whole = at::ones({part_numel * group->getSize()});
  return {name, [collective, group, calls, part, whole]() mutable {
            whole.fill_(1);  // sums would grow otherwise
            part.fill_(1);
            ddp::barrier(group);
            return 1000 / calls * benchmarks::milliseconds([&] {
                     for (int i = 0; i < calls; ++i) collective(whole, part, group);
                   });
          }};
}

void measure_tensor_collectives(const std::vector<int64_t>& sizes, int rounds) {
  const auto shm = ddp::default_group();
  const auto gloo = benchmarks::gloo_beside(shm);
  for (const auto bytes : sizes) {
    for (const auto& [name, collective] : collectives()) {
      std::vector<benchmarks::Way> ways{
          over("shm", collective, shm, bytes), over("gloo", collective, gloo, bytes)};
      benchmarks::run_in_turns(ways, /*warm_up=*/1, rounds);
      if (ddp::get_rank() != 0) continue;
      benchmarks::print_ways(name + ", " + std::to_string(bytes) + " bytes", "us a call", ways);
    }
  }
}

}  // namespace

void benchmarks::add_tensor_collectives(CLI::App& app) {
  auto* command = app.add_subcommand(
      "tensor_collectives", "Collectives of one tensor into one, over shared memory and Gloo.");
  static int rounds = 15;
  static std::vector<int64_t> sizes{4 << 10, 256 << 10, 16 << 20};
  command->add_option("--rounds", rounds, "Of each, in turns")->check(CLI::Range(1, 1000000));
  command->add_option("--bytes", sizes, "Of the larger one of the two tensors");
  command->callback([] {
    ddp::init_process_group(ddp::ProcessGroupOptions().backend("shm"));
    measure_tensor_collectives(sizes, rounds);
    ddp::destroy_process_group();
  });
}
