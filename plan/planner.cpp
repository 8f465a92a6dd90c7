#include "plan/planner.h"

#include <algorithm>
#include <optional>

#include <ddp/internal/text.h>

#include "plan/unit_text.h"

namespace ddp::plan {
namespace {

// More micro-batches a stage save less than a tenth of a step.
constexpr int64_t kMostMicrobatchesAStage = 8;

struct Order {
  PipelineSchedule schedule;
  int64_t chunks;
};

std::vector<Order> orders_of(int64_t pp) {
  if (pp == 1) return {{PipelineSchedule::OneFOneB, 1}};
  return {
      {PipelineSchedule::OneFOneB, 1},
      {PipelineSchedule::Interleaved, 1},
      {PipelineSchedule::GPipe, 1},
      {PipelineSchedule::Interleaved, 2}};
}

/// Lists the numbers of micro-batches to try: the task's, or powers of two and the largest one.
std::vector<int64_t> microbatches_of(const Task& task, const Layout& layout) {
  if (task.microbatches > 0) return {task.microbatches};
  const auto rows = task.batch / layout.dp;
  const auto most = layout.pp == 1 ? rows : std::min(rows, kMostMicrobatchesAStage * layout.pp);
  std::vector<int64_t> counts;
  for (int64_t count = 1; count < most; count *= 2) counts.push_back(count);
  counts.push_back(most);
  return counts;
}

/// Returns why a mesh fits with no number of micro-batches and no memory; "" where it may fit.
std::string reason_against(const Task& task, const Layout& layout) {
  const auto& model = task.model;
  if (model.heads % layout.tp != 0) return str("tp has to divide the heads, ", model.heads);
  if (layout.stages() > model.layers) {
    return str("a stage needs a layer, and the model has ", model.layers);
  }
  if (task.batch % layout.dp != 0) return str("dp has to divide the batch, ", task.batch);
  if (task.batch / layout.dp < task.microbatches) {
    return str(
        "a micro-batch needs a sample, and a replica has ", task.batch / layout.dp, " for ",
        task.microbatches, " micro-batches");
  }
  return "";
}

std::string reason_of_memory(const Task& task, const Layout& layout, const Memory& memory) {
  return str(
      "with ", layout.microbatches, layout.microbatches == 1 ? " micro-batch" : " micro-batches",
      " a rank needs ", bytes_text(memory.total()), " of ", bytes_text(task.cluster.memory),
      ": parameters, gradients and AdamW ", bytes_text(memory.state), ", what fsdp gathers ",
      bytes_text(memory.whole), ", activations ", bytes_text(memory.activations));
}

/// The layouts of one mesh, with or without fsdp.
class Candidates {
 public:
  Candidates(const Task& task, const Layout& mesh) : task_(task), mesh_(mesh) {}

  void add_to(Plans& plans) {
    const auto reason = reason_against(task_, mesh_);
    if (!reason.empty()) {
      plans.rejected.push_back({mesh_, reason});
      return;
    }
    bool any = false;
    for (const auto& order : orders_of(mesh_.pp)) {
      const auto best = best_of(order);
      if (!best) continue;
      plans.fitting.push_back(*best);
      any = true;
    }
    if (!any)
      plans.rejected.push_back({least_layout_, reason_of_memory(task_, least_layout_, *least_)});
  }

 private:
  std::optional<Plan> best_of(const Order& order) {
    auto layout = mesh_;
    layout.schedule = order.schedule;
    layout.chunks = order.chunks;
    std::optional<Plan> best;
    if (layout.stages() > task_.model.layers) return best;
    for (const auto count : microbatches_of(task_, layout)) {
      layout.microbatches = count;
      const auto memory = memory_of(task_.model, layout, task_.batch);
      if (!least_ || memory.total() < least_->total()) {
        least_ = memory;
        least_layout_ = layout;
      }
      if (memory.total() > task_.cluster.memory) continue;
      const auto time = step_time(task_.model, task_.cluster, layout, task_.batch);
      // More micro-batches at the same speed save memory; fewer compute larger products.
      if (!best || time.total() < best->time.total() * 0.9999) best = Plan{layout, memory, time};
    }
    return best;
  }

  const Task& task_;
  const Layout mesh_;
  std::optional<Memory> least_;
  Layout least_layout_;
};

std::vector<int64_t> divisors_of(int64_t number) {
  std::vector<int64_t> divisors;
  for (int64_t i = 1; i <= number; ++i) {
    if (number % i == 0) divisors.push_back(i);
  }
  return divisors;
}

}  // namespace

Plans make_plans(const Task& task) {
  Plans plans;
  for (const auto dp : divisors_of(task.cluster.ranks)) {
    for (const auto tp : divisors_of(task.cluster.ranks / dp)) {
      for (const bool fsdp : {false, true}) {
        if (fsdp && dp == 1) continue;
        Layout mesh;
        mesh.dp = dp;
        mesh.tp = tp;
        mesh.pp = task.cluster.ranks / dp / tp;
        mesh.fsdp = fsdp;
        Candidates(task, mesh).add_to(plans);
      }
    }
  }
  std::stable_sort(plans.fitting.begin(), plans.fitting.end(), [](const Plan& a, const Plan& b) {
    return a.time.total() < b.time.total();
  });
  return plans;
}

std::string error_of(const Task& task) {
  const auto& model = task.model;
  const auto& cluster = task.cluster;
  if (cluster.ranks % cluster.hosts != 0) {
    return str("--ranks: expected a multiple of --hosts ", cluster.hosts, ", got ", cluster.ranks);
  }
  if (model.hidden % model.heads != 0) {
    return str("--heads: expected a divisor of --hidden ", model.hidden, ", got ", model.heads);
  }
  if (model.parameters <= model.table_parameters()) {
    return str(
        "--parameters: expected more than the table of tokens has, --vocabulary * --hidden = ",
        model.table_parameters(), ", got ", model.parameters);
  }
  return "";
}

}  // namespace ddp::plan
