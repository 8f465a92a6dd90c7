// Measures Muon's step where the ranks divide the work, beside one in which each rank does all.
// ddprun -n 2 micro muon
#include <memory>
#include <string>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/muon.h>
#include <ddp/process_group.h>

#include "in_turns.h"
#include "linear_layers.h"
#include "micro.h"

namespace {

using ddp::optim::Muon;
using ddp::optim::MuonOptions;

benchmarks::Way make_muon_way(
    const std::string& name, int64_t layers, int64_t width, const MuonOptions& options,
    bool is_divided) {
  ddp::DistributedDataParallel model(benchmarks::make_linear_layers(layers, width));
  const auto matrices = ddp::optim::split_for_muon(*model).matrices;
  for (const auto& p : matrices) p.mutable_grad() = torch::randn_like(p);
  std::shared_ptr<Muon> muon;
  if (is_divided) {
    muon = std::make_shared<Muon>(*model, options);
  } else {
    muon = std::make_shared<Muon>(matrices, options);
  }
  return {name, [model, muon] {
            ddp::barrier();
            return benchmarks::milliseconds([&] { muon->step(); });
          }};
}

void measure_muon(int64_t layers, int64_t width, int rounds, at::ScalarType dtype) {
  const auto options = MuonOptions(1e-4).ns_dtype(dtype);
  std::vector<benchmarks::Way> ways{
      make_muon_way("each rank all", layers, width, options, /*is_divided=*/false),
      make_muon_way("each rank its share", layers, width, options, /*is_divided=*/true)};
  benchmarks::run_in_turns(ways, /*warm_up=*/1, rounds);
  if (ddp::get_rank() != 0) return;
  benchmarks::print_linear_layers(layers, width);
  benchmarks::print_ways("", "ms a step", ways);
}

}  // namespace

void benchmarks::add_muon(CLI::App& app) {
  auto* command = app.add_subcommand("muon", "Muon's step, divided among the ranks.");
  static int64_t layers = 8;
  static int64_t width = 512;
  static int rounds = 11;
  benchmarks::add_options_of_linear_layers(*command, layers, width);
  command->add_option("--rounds", rounds, "Steps of each, in turns")->check(CLI::Range(1, 1000000));
  command->callback([] {
    ddp::init_process_group();
    measure_muon(layers, width, rounds, at::kFloat);
    ddp::destroy_process_group();
  });
}
