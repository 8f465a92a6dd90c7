// Which layouts are tried, which are kept, and what is said of the others.
#include "plan/planner.h"

#include <algorithm>
#include <set>
#include <string>
#include <tuple>

#include "plan/report.h"
#include "task.h"

#include "support/catch.h"

namespace {

using namespace ddp::plan;
using plan_test::small_task;

std::string reason_of(const Plans& plans, int64_t dp, int64_t tp, int64_t pp) {
  for (const auto& one : plans.rejected) {
    if (one.layout.dp == dp && one.layout.tp == tp && one.layout.pp == pp) return one.reason;
  }
  return "";
}

}  // namespace

TEST_CASE("every mesh either fits or is rejected, the fastest first", "[pure]") {
  const auto task = small_task(8);
  const auto plans = make_plans(task);
  std::set<std::tuple<int64_t, int64_t, int64_t, bool>> meshes;
  for (const auto& plan : plans.fitting) {
    const auto& layout = plan.layout;
    CHECK(layout.dp * layout.tp * layout.pp == 8);
    CHECK(plan.memory.total() <= task.cluster.memory);
    CHECK(layout.dp * layout.microbatches <= task.batch);
    meshes.insert({layout.dp, layout.tp, layout.pp, layout.fsdp});
  }
  for (const auto& one : plans.rejected) {
    const auto& layout = one.layout;
    CHECK_FALSE(one.reason.empty());
    CHECK(meshes.insert({layout.dp, layout.tp, layout.pp, layout.fsdp}).second);
  }
  CHECK(meshes.size() == 10 + 6);  // 6 of the 10 have several replicas, which fsdp may cut
  CHECK(std::is_sorted(
      plans.fitting.begin(), plans.fitting.end(),
      [](const Plan& a, const Plan& b) { return a.time.total() < b.time.total(); }));
}

TEST_CASE("a mesh that no model can have says why", "[pure]") {
  auto task = small_task(16);
  task.batch = 12;
  const auto plans = make_plans(task);
  CHECK_THAT(reason_of(plans, 2, 8, 1), ContainsText("tp has to divide the heads, 4"));
  CHECK_THAT(
      reason_of(plans, 1, 1, 16), ContainsText("a stage needs a layer, and the model has 8"));
  CHECK_THAT(reason_of(plans, 8, 2, 1), ContainsText("dp has to divide the batch, 12"));
  task.microbatches = 4;
  const auto fixed = make_plans(task);
  for (const auto& plan : fixed.fitting) CHECK(plan.layout.microbatches == 4);
  CHECK_THAT(
      reason_of(fixed, 4, 4, 1),
      ContainsText("a micro-batch needs a sample, and a replica has 3 for 4 micro-batches"));
  CHECK(reason_of(plans, 4, 4, 1).empty());
}

TEST_CASE("memory rejects meshes, and more micro-batches or fsdp make them fit", "[pure]") {
  auto task = small_task(4);
  task.model.vocabulary = 0;
  task.model.parameters = 8 * 12 * 64 * 64;
  const double state = 16.0 * static_cast<double>(task.model.parameters);
  task.cluster.memory = 0.9 * state;
  const auto plans = make_plans(task);
  CHECK_THAT(
      reason_of(plans, 4, 1, 1),
      ContainsText("a rank needs ") && ContainsText("parameters, gradients and AdamW 0.00629 GB"));
  const auto fits = [&](int64_t dp, bool fsdp) {
    return std::any_of(plans.fitting.begin(), plans.fitting.end(), [&](const Plan& plan) {
      return plan.layout.dp == dp && plan.layout.fsdp == fsdp;
    });
  };
  CHECK_FALSE(fits(4, false));
  CHECK(fits(4, true));
  CHECK(fits(2, false));  // with tp or pp

  task.cluster.memory = state + 1.2 * 8 * layer_activations(task.model, 1);
  for (const auto& plan : make_plans(task).fitting) {
    const auto& layout = plan.layout;
    if (layout.dp == 4 && !layout.fsdp) CHECK(layout.microbatches == 4);  // one sample each
  }
}

TEST_CASE("reports name every plan and reason", "[pure]") {
  auto task = small_task(4);
  task.cluster.memory = 0.005e9;
  const auto plans = make_plans(task);
  REQUIRE(plans.fitting.size() > 2);
  REQUIRE_FALSE(plans.rejected.empty());
  const auto table = table_of(task, plans, 2);
  CHECK_THAT(table, ContainsText("399616 parameters in 8 layers on 4 ranks of 1 host"));
  CHECK_THAT(table, ContainsText("schedule") && ContainsText("What does not fit, dp x tp x pp:"));
  CHECK_THAT(
      table, ContainsText("and " + std::to_string(plans.fitting.size() - 2) + " more (--top)"));
  CHECK_THAT(table, ContainsText("  4 x 1 x 1: with 4 micro-batches a rank needs 0.00"));
  const auto json = json_of(task, plans);
  const auto count = [&](const std::string& word) {
    size_t found = 0;
    for (auto at = json.find(word); at != std::string::npos; at = json.find(word, at + 1)) ++found;
    return found;
  };
  CHECK(count("\"seconds\": {") == plans.fitting.size());
  CHECK(count("\"reason\": \"") == plans.rejected.size());

  task.cluster.memory = 1;
  CHECK_THAT(table_of(task, make_plans(task), 2), ContainsText("No mesh fits."));
}
