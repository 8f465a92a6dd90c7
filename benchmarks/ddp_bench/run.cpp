#include "run.h"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <ddp/collectives.h>
#include <ddp/main_first.h>

#include "benchmarks/ddp_bench/engines/modes.h"
#include "contest.h"
#include "examples/common/rank_device.h"
#include "fingerprint.h"
#include "result.h"
#include "statistics.h"
#include "timeline.h"

namespace ddp_bench {
namespace {

class Benchmark {
 public:
  Benchmark(const Options& options, const ddp::ProcessGroup& group)
      : options_(options), group_(group), device_(examples::rank_device(options.backend)) {}

  Task task() const {
    return make_task(
        options_.model, options_.seed, group_->getRank(),
        {device_, options_.dtype, options_.batch});
  }

  ddp::DistributedDataParallelOptions wrapper() const {
    auto wrapper = options_.wrapper;
    return wrapper.process_group(group_);
  }

  /// The requested modes, in their order; `none` first where it was not requested.
  std::vector<Contestant> contestants() const {
    std::vector<Contestant> all;
    if (!asked_for_none()) all.push_back(contestant(kNone, {}));
    for (const auto& mode : options_.modes) {
      if (options_.sweep.empty() || !find_mode(mode).has_buckets) {
        all.push_back(contestant(mode, {}));
        continue;
      }
      for (const double cap : options_.sweep) all.push_back(contestant(mode, cap));
    }
    return all;
  }

  std::string check(const std::vector<Contestant>& contestants) const {
    // Two ranks' sums do not depend on the order; a GPU's kernels may add in any order.
    const auto agreement = !device_.is_cpu()        ? Agreement::OnGpu
                           : group_->getSize() <= 2 ? Agreement::Bitwise
                                                    : Agreement::Rounded;
    return check_parameters(contestants, task().net->parameters(), group_, agreement);
  }

  std::vector<Result> results(const std::vector<Contestant>& contestants) const {
    const auto none = std::find_if(
        contestants.begin(), contestants.end(), [](const auto& c) { return c.mode == kNone; });
    std::vector<Result> results;
    for (const auto& contestant : contestants) {
      if (contestant.mode == kNone && !asked_for_none()) continue;
      results.push_back(result(contestant, *none));
    }
    return results;
  }

  c10::Device device() const { return device_; }

 private:
  bool asked_for_none() const {
    const auto& modes = options_.modes;
    return std::find(modes.begin(), modes.end(), kNone) != modes.end();
  }

  Contestant contestant(const std::string& mode, std::optional<double> swept_cap) const {
    auto wrapper_options = wrapper();
    if (swept_cap) wrapper_options.bucket_cap_mb(swept_cap);
    return {
        mode, swept_cap, find_mode(mode).communicates, make_engine(mode, task(), wrapper_options)};
  }

  Result result(const Contestant& contestant, const Contestant& none) const {
    const auto& sizes = contestant.engine->messages().elements;
    Result result;
    result.model = options_.model;
    result.mode = contestant.mode;
    result.backend = group_->getBackend(device_.type())->getBackendName();
    result.world = group_->getSize();
    if (find_mode(contestant.mode).has_buckets) {
      result.bucket_cap_mb =
          contestant.bucket_cap_mb ? contestant.bucket_cap_mb : options_.wrapper.bucket_cap_mb();
    }
    const auto chosen = contestant.engine->chosen_cap_mb();
    if (chosen) result.bucket_cap_mb = chosen;
    result.step_ms = quantile(contestant.step_ms, 0.5);
    result.step_ms_p10 = quantile(contestant.step_ms, 0.1);
    result.step_ms_p90 = quantile(contestant.step_ms, 0.9);
    result.ratio = paired_ratio(contestant.round_step_ms, none.round_step_ms);
    result.cpu = {
        quantile(contestant.round_cpu_ms, 0.5),
        paired_ratio(contestant.round_cpu_ms, none.round_cpu_ms)};
    result.compute_ms = quantile(none.step_ms, 0.5);
    result.comm_ms = contestant.communicates ? quantile(contestant.comm_ms, 0.5) : 0;
    result.overlap = overlap(result.compute_ms, result.comm_ms, result.step_ms);
    result.bytes = std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) *
                   static_cast<int64_t>(sizeof(float));
    result.checksum = fingerprint(contestant.engine->parameters()).checksum;
    return result;
  }

  const Options& options_;
  ddp::ProcessGroup group_;
  c10::Device device_;
};

}  // namespace

void run(const Options& options, const ddp::ProcessGroup& group, std::ostream& out) {
  at::set_num_threads(options.threads);
  const bool speaks = group->getRank() == 0;
  std::ofstream timeline;
  if (!options.timeline.empty()) {
    const auto open = [&] {
      if (speaks) timeline.open(options.timeline);
      TORCH_CHECK_VALUE(
          timeline, "--timeline ", options.timeline, ": expected a file that can be written.");
    };
    ddp::main_first(open, group);  // an error is one on all ranks
  }

  const Benchmark benchmark(options, group);
  auto contestants = benchmark.contestants();
  compete(contestants, {options.iters, options.rounds, options.warmup}, group, benchmark.device());
  if (speaks) {
    for (const auto& result : benchmark.results(contestants)) out << to_json(result) << "\n";
    out.flush();
  }
  const auto disagreement = benchmark.check(contestants);
  // The destructor of a wrapper uses the store, which is in rank 0's process.
  contestants.clear();
  ddp::barrier(group);
  TORCH_CHECK(disagreement.empty(), disagreement);
  if (options.timeline.empty()) return;
  const auto spans = record_step(benchmark.task(), benchmark.wrapper(), options.warmup);
  const auto json = timeline_json(options.model, spans, group);
  if (speaks) timeline << json << "\n";
}

}  // namespace ddp_bench
