#include "modes.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <ddp/comm_hooks.h>

#include "c10d_engine.h"
#include "ddp_engine.h"
#include "plain_engines.h"

namespace ddp_bench {

const std::vector<Mode>& modes() {
  static const std::vector<Mode> all = {
      {kNone, "a barrier a step, no gradients sent", false, false},
      {"naive", "an all-reduce for each parameter after backward", true, false},
      {"flat", "one after backward, of all gradients copied together", true, false},
      {"c10d", "LibTorch's c10d::Reducer, driven from C++", true, true},
      {"ddp", "this library", true, true},
      {"ddp_view", "with gradient_as_bucket_view", true, true},
      {"ddp_unused", "with find_unused_parameters", true, true},
      {"ddp_static", "with static_graph", true, true},
      {"ddp_finite", "with find_nonfinite", true, true},
      {"ddp_hook", "with hooks::all_reduce: one rank packs and unpacks, too", true, true},
      {"ddp_quiet", "with stats_every(0)", true, true},
      {"ddp_step", "with step_in_backward", true, true},
      // The tuner measures seven steps; then the same as the other modes.
      {"ddp_tuned", "with bucket_cap_mb(kTuneBucketCap)", true, false, 10}};
  return all;
}

const Mode& find_mode(const std::string& name) {
  const auto found = std::find_if(
      modes().begin(), modes().end(), [&](const Mode& mode) { return mode.name == name; });
  TORCH_CHECK_VALUE(found != modes().end(), "mode: expected a known one, got ", name, ".");
  return *found;
}

ddp::DistributedDataParallelOptions options_of_mode(
    const std::string& mode, ddp::DistributedDataParallelOptions options) {
  if (mode == "ddp_view") options.gradient_as_bucket_view(true);
  if (mode == "ddp_unused") options.find_unused_parameters(true);
  if (mode == "ddp_static") options.static_graph(true);
  if (mode == "ddp_finite") options.find_nonfinite(true);
  if (mode == "ddp_quiet") options.stats_every(0);
  if (mode == "ddp_tuned") options.bucket_cap_mb(ddp::kTuneBucketCap);
  return options;
}

std::unique_ptr<Engine> make_engine(
    const std::string& mode, Task task, const ddp::DistributedDataParallelOptions& options) {
  const auto& group = options.process_group();
  if (find_mode(mode).name == kNone) return make_none(std::move(task), group);
  if (mode == "naive") return make_naive(std::move(task), group);
  if (mode == "flat") return make_flat(std::move(task), group);
  if (mode == "c10d") return make_c10d(std::move(task), options);
  auto engine = std::make_unique<DdpEngine>(
      std::move(task), options_of_mode(mode, options),
      mode == "ddp_step" ? DdpEngine::Optimize::InBackward : DdpEngine::Optimize::AfterBackward);
  if (mode == "ddp_hook") engine->register_comm_hook(ddp::hooks::all_reduce(group));
  return engine;
}

}  // namespace ddp_bench
