// Times ways of averaging gradients: `ddprun -n 2 ddp_bench --model mlp --modes none,c10d,ddp`.
#include <malloc.h>

#include <iostream>

#include <c10/util/Exception.h>
#include <ddp/process_group.h>

#include "examples/common/default_group.h"
#include "options.h"
#include "run.h"
#include "runs/fully_sharded_run.h"
#include "runs/memory_run.h"
#include "runs/pipeline_run.h"
#include "runs/tensor_parallel_run.h"

namespace {

int fail(const char* message, int status) {
  std::cerr << "ddp_bench: " << message << std::endl;
  return status;
}

/// Drops the warnings of ranks other than 0, which are the same as rank 0's.
class NoWarnings : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

/// Every step frees and allocates gradients. By default malloc returns large ones to the kernel
/// each time, and the page faults would take longer than the measured copies.
void keep_freed_memory() {
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);
}

int measure(const ddp_bench::Options& options) {
  // Memory is measured with malloc's defaults, as users have them.
  if (!options.memory && options.fsdp_memory.empty()) keep_freed_memory();
  const examples::DefaultGroup group(options.backend);
  NoWarnings quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(
      ddp::get_rank() == 0 ? c10::WarningUtils::get_warning_handler() : &quiet);
  const bool shards = options.fsdp || !options.fsdp_memory.empty();
  const auto run = shards           ? ddp_bench::run_fully_sharded
                   : options.tp     ? ddp_bench::run_tensor_parallel
                   : options.pp     ? ddp_bench::run_pipeline
                   : options.memory ? ddp_bench::run_memory
                                    : ddp_bench::run;
  run(options, ddp::default_group(), std::cout);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::ostream silent(nullptr);
    const bool speaks = ddp::get_local_rank() == 0;
    const auto options = ddp_bench::parse_options(argc, argv, speaks ? std::cout : silent);
    return options ? measure(*options) : 0;
  } catch (const ddp_bench::UsageError& error) {
    return fail(error.what(), 2);
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace(), 1);
  } catch (const std::exception& error) {
    return fail(error.what(), 1);
  }
}
