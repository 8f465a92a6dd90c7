// What single parts cost, by size; each is a subcommand: `ddprun -n 2 costs all_reduce`.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include <ATen/Parallel.h>

#include "costs.h"

int main(int argc, char** argv) {
  CLI::App app("What single parts of ddp cost, by size. Ranks come from ddprun, but for reducer.");
  app.require_subcommand(1);
  for (const auto add :
       {costs::add_all_reduce, costs::add_groups, costs::add_init_time, costs::add_inputs,
        costs::add_parameters, costs::add_reducer, costs::add_vote, costs::add_worlds}) {
    add(app);
  }
  at::set_num_threads(1);
  try {
    CLI11_PARSE(app, argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "costs: %s\n", error.what());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
