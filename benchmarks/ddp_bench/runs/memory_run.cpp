#include "memory_run.h"

#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>
#include <ddp/collectives.h>

#include "benchmarks/ddp_bench/engines/modes.h"
#include "benchmarks/ddp_bench/result.h"
#include "examples/common/rank_device.h"
#include "memory_sampler.h"

namespace ddp_bench {
namespace {

// Makes the model, wraps it and trains, and fills in the results.
void train(
    const Options& options, const ddp::ProcessGroup& group, c10::Device device,
    MemoryResult& result) {
  auto wrapper = options.wrapper;
  wrapper.process_group(group);
  MemorySampler sampler;
  const auto engine = make_engine(
      result.mode,
      make_task(
          options.model, options.seed, group->getRank(), {device, options.dtype, options.batch}),
      wrapper);
  for (int step = 0; step < options.warmup + options.iters; ++step) engine->step();
  result.peak = sampler.stop();
  for (const auto& p : engine->parameters()) result.bytes += static_cast<int64_t>(p.nbytes());
  // The destructor of a wrapper uses the store, which is in rank 0's process.
  ddp::barrier(group);
}

Pss mean_of_ranks(const Pss& mine, const ddp::ProcessGroup& group, c10::Device device) {
  const std::vector<int64_t> values = {mine.anonymous, mine.shared, mine.file};
  auto sum = at::tensor(values, at::kLong).to(device);
  ddp::all_reduce(sum, c10d::ReduceOp::SUM, group);
  const auto mean = [&](int64_t index) { return sum[index].item<int64_t>() / group->getSize(); };
  return {mean(0), mean(1), mean(2)};
}

}  // namespace

void run_memory(const Options& options, const ddp::ProcessGroup& group, std::ostream& out) {
  at::set_num_threads(options.threads);
  const auto device = examples::rank_device(options.backend);
  MemoryResult result;
  result.model = options.model;
  result.mode = options.modes.front();
  result.backend = group->getBackend(device.type())->getBackendName();
  result.world = group->getSize();
  train(options, group, device, result);
  result.peak = mean_of_ranks(result.peak, group, device);
  if (group->getRank() != 0) return;
  out << to_json(result) << "\n";
  out.flush();
}

}  // namespace ddp_bench
