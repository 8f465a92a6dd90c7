// Times how long making groups takes: `ddprun -n 8 costs groups`.
//
// Rank 0 prints a line of JSON for each way, of `rounds` repetitions that take turns. Destroying
// what was made is not timed.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/device_mesh.h>
#include <ddp/process_group.h>

#include "costs.h"
#include "repetitions.h"

namespace {

struct GroupSettings {
  std::string backend;
  int rounds = 20;
};

/// What an operation makes, kept until its time is taken.
using Made = std::vector<ddp::ProcessGroup>;

struct Way {
  std::string what;
  std::function<std::shared_ptr<void>()> make;
  costs::Times times = {};
};

std::shared_ptr<void> new_group_of_all() {
  std::vector<int> ranks;
  for (int rank = 0; rank < ddp::get_world_size(); ++rank) ranks.push_back(rank);
  return std::make_shared<Made>(Made{ddp::new_group(ranks)});
}

/// Three splits into pairs: 12 groups of 8 ranks, 3 of them with each rank.
std::shared_ptr<void> pairs_of_three_axes() {
  auto made = std::make_shared<Made>();
  for (const int axis : {1, 2, 4}) made->push_back(ddp::split_group(ddp::get_rank() & ~axis));
  return made;
}

std::shared_ptr<void> cube() {
  return std::make_shared<ddp::DeviceMesh>(ddp::init_device_mesh({2, 2, 2}, {"pp", "dp", "tp"}));
}

void time_groups(const GroupSettings& settings) {
  ddp::init_process_group(ddp::ProcessGroupOptions().backend(settings.backend));
  std::vector<Way> ways = {{"new_group of all ranks", new_group_of_all}};
  if (ddp::get_world_size() == 8) {
    ways.push_back({"3 split_group into pairs", pairs_of_three_axes});
    ways.push_back({"init_device_mesh {2, 2, 2}", cube});
  }
  for (int round = 0; round < settings.rounds; ++round) {
    for (auto& way : ways) {
      ddp::barrier();
      std::shared_ptr<void> made;
      way.times.sorted.push_back(costs::microseconds_of([&] {
        made = way.make();
        ddp::barrier();
      }));
    }
  }
  for (auto& way : ways) {
    std::sort(way.times.sorted.begin(), way.times.sorted.end());
    if (ddp::get_rank() == 0) costs::print_line(way.what, ddp::get_world_size(), 0, way.times);
  }
  ddp::barrier();
  ddp::destroy_process_group();
}

}  // namespace

void costs::add_groups(CLI::App& app) {
  auto* command = app.add_subcommand("groups", "Making groups and a mesh: with 8 ranks.");
  static GroupSettings settings;
  command->add_option("--backend", settings.backend, "gloo, shm, ...; empty: the library's choice");
  command->add_option("--rounds", settings.rounds, "how often each is made")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->callback([] { time_groups(settings); });
}
