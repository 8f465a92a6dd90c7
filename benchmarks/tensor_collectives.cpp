// The collectives of one tensor into one tensor, through shared memory and through Gloo in turns:
//
//     ddprun -n 2 tensor_collectives
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ddp/collectives.h>
#include <ddp/process_group.h>
#include <CLI/CLI.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "median.h"

namespace {

struct Collective {
  std::string name;
  std::function<void(at::Tensor& whole, at::Tensor& part, const ddp::ProcessGroup&)> run;
};

const std::vector<Collective>& collectives() {
  static const std::vector<Collective> all = {
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

/// Microseconds of a call, over `calls` that follow each other.
double microseconds(
    const Collective& collective, at::Tensor& whole, at::Tensor& part,
    const ddp::ProcessGroup& group, int calls) {
  ddp::barrier(group);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) collective.run(whole, part, group);
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  return took.count() / calls;
}

}  // namespace

int main(int argc, char** argv) {
  int rounds = 15;
  std::vector<int64_t> sizes{4 << 10, 256 << 10, 16 << 20};
  CLI::App app("Collectives of one tensor into one tensor, through shared memory and Gloo.");
  app.add_option("--rounds", rounds, "Of each, in turns")->check(CLI::Range(1, 1000000));
  app.add_option("--bytes", sizes, "Of the larger one of the two tensors");
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  ddp::init_process_group(ddp::ProcessGroupOptions().backend("shm"));
  {
    const auto shm = ddp::default_group();
    const auto gloo = ddp::make_process_group(
        ddp::ProcessGroupOptions()
            .backend("gloo")
            .store(c10::make_intrusive<c10d::PrefixStore>("gloo", shm->getStore()))
            .rank(ddp::get_rank())
            .world_size(ddp::get_world_size()));
    const bool prints = ddp::get_rank() == 0;
    if (prints) {
      std::printf(
          "%-24s %12s %10s %10s %8s   %d ranks\n", "", "bytes", "shm, us", "gloo, us", "ratio",
          ddp::get_world_size());
    }
    for (const auto bytes : sizes) {
      const int64_t part_numel = bytes / 4 / ddp::get_world_size();
      auto part = at::ones({part_numel});
      auto whole = at::ones({part_numel * ddp::get_world_size()});
      const int calls = bytes > (1 << 20) ? 2 : 50;
      for (const auto& collective : collectives()) {
        std::vector<double> over_shm, over_gloo, ratios;
        const auto through_shm = [&] {
          over_shm.push_back(microseconds(collective, whole, part, shm, calls));
        };
        const auto through_gloo = [&] {
          over_gloo.push_back(microseconds(collective, whole, part, gloo, calls));
        };
        for (int round = -1; round < rounds; ++round) {  // the first one is not counted
          round % 2 == 0 ? through_shm() : through_gloo();
          round % 2 == 0 ? through_gloo() : through_shm();
          if (round < 0) {
            over_shm.clear();
            over_gloo.clear();
          } else {
            ratios.push_back(over_gloo.back() / over_shm.back());
          }
          whole.fill_(1);  // or sums would grow
          part.fill_(1);
        }
        if (!prints) continue;
        std::printf(
            "%-24s %12lld %10.0f %10.0f %8.2f\n", collective.name.c_str(),
            static_cast<long long>(bytes), benchmarks::median(over_shm),
            benchmarks::median(over_gloo), benchmarks::median(ratios));
      }
    }
  }
  ddp::destroy_process_group();
  return 0;
}
