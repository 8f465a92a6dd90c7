#include "plan/cost.h"

#include <algorithm>
#include <vector>

#include "pipeline/schedule.h"
#include "pipeline/simulate.h"

namespace ddp::plan {
namespace {

constexpr double kState = 16;  // bytes: parameter, gradient, AdamW's two numbers

/// The most chunks and micro-batches of a rank whose backward has not run.
int64_t most_live(const Layout& layout, int64_t rank) {
  if (layout.pp == 1) return 1;
  const PipelineShape shape{layout.pp, layout.chunks, layout.microbatches};
  int64_t live = 0, most = 0;
  for (const auto& action : pipeline_actions(layout.schedule, shape, rank)) {
    live += action.kind == 'F' ? 1 : -1;
    most = std::max(most, live);
  }
  return most;
}

/// docs/fully_sharded.md#memory: units are whole by turns; in a pipeline all of a rank's, from the
/// first forward of a step to its last backward, with whole gradients.
double whole_bytes(const Model& model, const Layout& layout, double own_parameters) {
  if (!layout.fsdp) return 0;
  if (layout.pp > 1) return 2 * kFloatBytes * own_parameters;
  const double unit =
      std::max(model.layer_parameters(), static_cast<double>(model.table_parameters())) /
      static_cast<double>(layout.tp);
  return kFloatBytes * unit * (4 + 1 / static_cast<double>(layout.dp));
}

}  // namespace

Memory memory_of_rank(const Model& model, const Layout& layout, int64_t batch, int64_t rank) {
  const auto share = share_of(model, layout, rank);
  const auto rows = static_cast<double>(rows_of_microbatch(layout, batch));
  const double cut = layout.fsdp ? static_cast<double>(layout.dp) : 1;

  Memory memory;
  memory.state = kState * share.parameters / cut;
  memory.whole = whole_bytes(model, layout, share.parameters);
  const auto live = static_cast<double>(most_live(layout, rank) * share.largest_chunk);
  memory.activations = rows * live * layer_activations(model, layout.tp);
  if (model.checkpoint) {  // the layer that is computed again
    auto kept = model;
    kept.checkpoint = false;
    memory.activations += rows * layer_activations(kept, layout.tp);
  }
  if (share.has_head) memory.activations += rows * logit_bytes(model, layout.tp);
  memory.state *= model.corrections.state;
  memory.activations *= model.corrections.activations;
  memory.beside = model.corrections.beside;
  return memory;
}

namespace {

int64_t size_of(const Layout& layout, Axis axis) {
  if (axis == Axis::Tp) return layout.tp;
  return axis == Axis::Dp ? layout.dp : layout.pp;
}

/// The distance between neighbors of an axis, in ranks.
int64_t stride_of(const Layout& layout, Axis axis) {
  if (axis == Axis::Tp) return 1;
  return axis == Axis::Dp ? layout.tp : layout.tp * layout.dp;
}

/// How many ranks of a group lie on one host, at most.
int64_t local_size(const Cluster& cluster, const Layout& layout, Axis axis) {
  const auto within = std::max<int64_t>(1, cluster.ranks_a_host() / stride_of(layout, axis));
  return std::min(size_of(layout, axis), within);
}

/// Hockney's model of one direction of a ring: a reduce-scatter, or an all-gather.
double ring_time(const Link& link, int64_t ranks, double bytes) {
  if (ranks == 1) return 0;
  const auto steps = static_cast<double>(ranks - 1);
  return steps * (link.latency + bytes / static_cast<double>(ranks) / link.rate);
}

/// One direction over both levels: hosts exchange a part of `1 / local` for each local rank, all of
/// which goes through the same network, as do those of the host's other groups.
double time_of_direction(const Cluster& cluster, const Layout& layout, Axis axis, double bytes) {
  const auto local = local_size(cluster, layout, axis);
  const auto hosts = size_of(layout, axis) / local;
  const auto groups = static_cast<double>(cluster.ranks_a_host()) / static_cast<double>(local);
  Link shared = cluster.network;
  shared.rate /= std::max(1.0, groups);
  return ring_time(cluster.host, local, bytes) + ring_time(shared, hosts, bytes);
}

constexpr double kBucket = 25.0 * (1 << 20);  // bytes: the wrapper's default

/// Seconds of one micro-batch in one stage.
struct Pass {
  double forward = 0, backward = 0;            // computing
  double forward_sums = 0, backward_sums = 0;  // over tp
};

/// All-reduces over tp of one micro-batch in one stage. A layer has 2 a direction; the table 1 in
/// forward, and the head 1 in backward.
struct Sums {
  double forward = 0, backward = 0;
};

Sums sums_of(const Model& model, const Layout& layout, int64_t stage) {
  const auto layers = static_cast<double>(layers_of_stage(model, layout, stage));
  const bool has_table = stage == 0 && model.vocabulary > 0;
  const bool has_head = stage + 1 == layout.stages() && model.vocabulary > 0;
  return {
      2 * layers + (has_table ? 1 : 0), (model.checkpoint ? 4 : 2) * layers + (has_head ? 1 : 0)};
}

Pass pass_of(
    const Model& model, const Cluster& cluster, const Layout& layout, double rows, int64_t stage) {
  const auto layers = static_cast<double>(layers_of_stage(model, layout, stage));
  const double rate = cluster.operations * static_cast<double>(layout.tp) / rows;
  const bool has_head = stage + 1 == layout.stages();
  const double head = has_head ? head_operations(model) / rate : 0;
  const double beside = 1e-6 * model.layer_us / 3;
  const double once = layers * (layer_operations(model) / rate + beside);
  const double beside_bytes = layout.tp > 1 ? 1e-6 * model.sum_us : 0;
  const double bytes = rows * boundary_bytes(model) * model.corrections.tensor_bytes;
  const double sum = beside_bytes + all_reduce_time(cluster, layout, Axis::Tp, bytes);
  const auto sums = sums_of(model, layout, stage);

  Pass pass;
  pass.forward = once + head;
  pass.backward = (model.checkpoint ? 3 : 2) * once + 2 * head;
  pass.forward_sums = sum * sums.forward;
  pass.backward_sums = sum * sums.backward;
  return pass;
}

double length_of(const Pass& pass) {
  return pass.forward + pass.backward + pass.forward_sums + pass.backward_sums;
}

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
    steps.push_back(pipeline_steps(pipeline_actions(layout.schedule, shape, rank), shape, rank));
  }
  const auto& longest = longest_of(stages);
  PipelineCosts costs;
  costs.forward = longest.forward + longest.forward_sums;
  costs.backward = longest.backward + longest.backward_sums;
  for (const auto& stage : stages) costs.weights.push_back(length_of(stage) / length_of(longest));
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
  const double bytes = kFloatBytes * own_parameters(model, layout) * model.corrections.data_bytes;
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

DirectionBytes directions_of_step(
    const Model& model, const Layout& layout, int64_t batch, int64_t rank) {
  const double rows = static_cast<double>(batch) / static_cast<double>(layout.dp);
  DirectionBytes bytes;
  for (int64_t stage = rank; layout.tp > 1 && stage < layout.stages(); stage += layout.pp) {
    const auto sums = sums_of(model, layout, stage);
    bytes.tensor += 2 * (sums.forward + sums.backward) * rows * boundary_bytes(model);
  }
  if (layout.dp == 1) return bytes;
  const bool gathers_once = !layout.fsdp || layout.pp > 1;
  const double directions = gathers_once ? 2.0 : 3.0 * static_cast<double>(layout.microbatches);
  bytes.data = directions * kFloatBytes * share_of(model, layout, rank).parameters;
  return bytes;
}

Memory memory_of(const Model& model, const Layout& layout, int64_t batch) {
  Memory most;
  for (int64_t rank = 0; rank < layout.pp; ++rank) {
    const auto memory = memory_of_rank(model, layout, batch, rank);
    if (memory.total() > most.total()) most = memory;
  }
  return most;
}

double all_reduce_time(const Cluster& cluster, const Layout& layout, Axis axis, double bytes) {
  return 2 * time_of_direction(cluster, layout, axis, bytes);
}

double gather_time(const Cluster& cluster, const Layout& layout, Axis axis, double bytes) {
  return time_of_direction(cluster, layout, axis, bytes);
}

double message_time(const Cluster& cluster, const Layout& layout, double bytes) {
  const auto stride = stride_of(layout, Axis::Pp);
  if (!crosses_hosts(cluster, layout, Axis::Pp)) {
    return cluster.host.latency + bytes / cluster.host.rate;
  }
  // The ranks of a host whose next stage is elsewhere.
  const auto senders = static_cast<double>(std::min(stride, cluster.ranks_a_host()));
  return cluster.network.latency + bytes * senders / cluster.network.rate;
}

bool crosses_hosts(const Cluster& cluster, const Layout& layout, Axis axis) {
  return local_size(cluster, layout, axis) < size_of(layout, axis);
}

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
