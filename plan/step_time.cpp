#include "plan/step_time.h"

#include <algorithm>
#include <vector>

#include "pipeline/schedule.h"
#include "pipeline/simulate.h"
#include "plan/traffic.h"

namespace ddp::plan {
namespace {

constexpr double kBucket = 25.0 * (1 << 20);  // bytes: the wrapper's default

/// Seconds of one micro-batch in one stage.
struct Pass {
  double forward = 0, backward = 0;            // computing
  double forward_sums = 0, backward_sums = 0;  // over tp
};

Pass pass_of(
    const Model& model, const Cluster& cluster, const Layout& layout, double rows, int64_t stage) {
  const auto layers = static_cast<double>(layers_of_stage(model, layout, stage));
  const double rate = cluster.operations * static_cast<double>(layout.tp) / rows;
  const bool has_head = stage + 1 == layout.stages();
  const bool has_table = stage == 0 && model.vocabulary > 0;
  const double head = has_head ? head_operations(model) / rate : 0;
  const double beside = 1e-6 * model.layer_us / 3;
  const double once = layers * (layer_operations(model) / rate + beside);
  const double beside_bytes = layout.tp > 1 ? 1e-6 * model.sum_us : 0;
  const double sum =
      beside_bytes + all_reduce_time(cluster, layout, Axis::Tp, rows * boundary_bytes(model));

  // A layer has 2 sums a direction; the table 1 in forward, and the head 1 in backward.
  Pass pass;
  pass.forward = once + head;
  pass.backward = (model.checkpoint ? 3 : 2) * once + 2 * head;
  pass.forward_sums = sum * (2 * layers + (has_table ? 1 : 0));
  pass.backward_sums =
      sum * ((model.checkpoint ? 4 : 2) * layers + (has_head && model.vocabulary > 0 ? 1 : 0));
  return pass;
}

double length_of(const Pass& pass) {
  return pass.forward + pass.backward + pass.forward_sums + pass.backward_sums;
}

/// Returns the passes by stage.
std::vector<Pass> passes_of(
    const Model& model, const Cluster& cluster, const Layout& layout, double rows) {
  std::vector<Pass> passes;
  for (int64_t stage = 0; stage < layout.stages(); ++stage) {
    passes.push_back(pass_of(model, cluster, layout, rows, stage));
  }
  return passes;
}

/// Adds up the passes of the chunks of each rank, by rank.
std::vector<Pass> passes_of_ranks(const Layout& layout, const std::vector<Pass>& stages) {
  std::vector<Pass> ranks(static_cast<size_t>(layout.pp));
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    auto& rank = ranks[stage % ranks.size()];
    rank.forward += stages[stage].forward;
    rank.backward += stages[stage].backward;
    rank.forward_sums += stages[stage].forward_sums;
    rank.backward_sums += stages[stage].backward_sums;
  }
  return ranks;
}

const Pass& longest_of(const std::vector<Pass>& passes) {
  return *std::max_element(passes.begin(), passes.end(), [](const Pass& a, const Pass& b) {
    return length_of(a) < length_of(b);
  });
}

/// Simulates the pipeline until its last stage has ended, with a core for each rank.
double pipeline_time(const Layout& layout, const std::vector<Pass>& stages, double message) {
  const PipelineShape shape{layout.pp, layout.chunks, layout.microbatches};
  std::vector<std::vector<PipelineStep>> steps;
  for (int64_t rank = 0; rank < layout.pp; ++rank) {
    const auto actions = pipeline_actions(layout.schedule, shape, rank);
    steps.push_back(pipeline_steps(actions, shape, rank));
  }
  const auto& longest = longest_of(stages);
  PipelineCosts costs;
  costs.forward = longest.forward + longest.forward_sums;
  costs.backward = longest.backward + longest.backward_sums;
  for (const auto& stage : stages) {
    costs.weights.push_back(length_of(stage) / length_of(longest));
  }
  costs.message = message;
  return simulate(shape, steps, costs).time;
}

/// Returns the part of a collective that so much computing does not hide: at least its last part,
/// which needs the last gradient, or which the last layer needs.
double exposed(double collective, double computing, double last_part, double overlap) {
  return collective - overlap * std::min(collective - last_part, computing);
}

/// The parameters of the rank that has most of them.
double own_parameters(const Model& model, const Layout& layout) {
  double most = 0;
  for (int64_t rank = 0; rank < layout.pp; ++rank) {
    most = std::max(most, share_of(model, layout, rank).parameters);
  }
  return most;
}

double data_time(
    const Model& model, const Cluster& cluster, const Layout& layout, const Pass& pass) {
  if (layout.dp == 1) return 0;
  const double bytes = kFloatBytes * own_parameters(model, layout);
  const double backward = pass.backward + pass.backward_sums;
  if (!layout.fsdp) {  // in the last backward pass
    const double reduction = all_reduce_time(cluster, layout, Axis::Dp, bytes);
    const double last = reduction * std::min(1.0, kBucket / bytes);
    return exposed(reduction, backward, last, cluster.overlap);
  }
  const double gather = gather_time(cluster, layout, Axis::Dp, bytes);
  const double unit = gather / static_cast<double>(std::max<int64_t>(1, model.layers / layout.pp));
  const double forward = pass.forward + pass.forward_sums;
  if (layout.pp > 1) {  // gathered once a step, reduced once
    return exposed(gather, forward, unit, cluster.overlap) +
           exposed(gather, backward, unit, cluster.overlap);
  }
  // Gathered in forward and backward, reduced in backward, of each micro-batch.
  return static_cast<double>(layout.microbatches) *
         (exposed(gather, forward, unit, cluster.overlap) +
          exposed(2 * gather, backward, 2 * unit, cluster.overlap));
}

}  // namespace

StepTime step_time(
    const Model& model, const Cluster& cluster, const Layout& layout, int64_t batch) {
  // The mean: m of them make a replica's share.
  const auto microbatches = static_cast<double>(layout.microbatches);
  const double rows = static_cast<double>(batch) / static_cast<double>(layout.dp) / microbatches;
  const auto stages = passes_of(model, cluster, layout, rows);
  const auto ranks = passes_of_ranks(layout, stages);
  const auto& busiest = longest_of(ranks);
  const double message = message_time(cluster, layout, rows * boundary_bytes(model));

  StepTime time;
  time.compute = microbatches * (busiest.forward + busiest.backward);
  time.tensor = microbatches * (busiest.forward_sums + busiest.backward_sums);
  const double busy = time.compute + time.tensor;
  const double alone = layout.pp == 1 ? busy : pipeline_time(layout, stages, message);
  // A rank that waits leaves its core to another rank. So the time of all work on the cores bounds
  // the step, including sums where the cores send.
  const double sums_on_cores = 1 - cluster.overlap;
  double all = 0;
  for (const auto& rank : ranks) {
    const double sums = rank.forward_sums + rank.backward_sums;
    all += microbatches * (rank.forward + rank.backward + sums_on_cores * sums);
  }
  const double by_turns =
      all / static_cast<double>(layout.pp) * cluster.crowding() + (1 - sums_on_cores) * time.tensor;
  time.idle = std::max(alone, by_turns) - busy;
  time.data = data_time(model, cluster, layout, busiest);
  const double cut = layout.fsdp ? static_cast<double>(layout.dp) : 1;
  time.update = 1e-9 * model.update_ns * own_parameters(model, layout) / cut * cluster.crowding();
  return time;
}

}  // namespace ddp::plan
