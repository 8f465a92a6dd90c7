// The small benchmarks, each a subcommand:
//
//     micro sampler
//     ddprun -n 2 micro zero
#include <cstdio>
#include <cstdlib>
#include <exception>

#include <ATen/Parallel.h>

#include "micro.h"

int main(int argc, char** argv) {
  using namespace benchmarks;
  CLI::App app("What single parts of ddp cost. Ranks come from ddprun, where one is not enough.");
  app.require_subcommand(1);
  for (const auto add :
       {add_averaged_model,
        add_call_history,
        add_checkpoint,
        add_diloco,
        add_elastic,
        add_hooks,
        add_join,
        add_messages,
        add_mixed_precision,
        add_muon,
        add_offload,
        add_optimizers,
        add_prefetch,
        add_profiler,
        add_recompute,
        add_sampler,
        add_store,
        add_stream,
        add_tensor_collectives,
        add_zero}) {
    add(app);
  }
  at::set_num_threads(1);
  try {
    CLI11_PARSE(app, argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "micro: %s\n", error.what());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
