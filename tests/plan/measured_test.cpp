// The model, fitted to runs whose numbers are worked out from the model itself.
#include "plan/measured.h"

#include <string>
#include <utility>

#include "plan/cost.h"
#include "task.h"

#include "support/catch.h"

namespace {

using namespace ddp::plan;
using plan_test::mesh;
using plan_test::small_task;

/// A run of the job that has twice the state, half the activations, and 3 and 1.5 times the bytes
/// of the formulas, on ranks that compute 2.5e9 operations a second.
MeasuredJob run_of(const Task& task, const Layout& layout, int64_t stage) {
  Task fast = task;
  fast.cluster.operations = 2.5e9;
  const auto time = step_time(fast.model, fast.cluster, layout, task.batch);
  const auto memory = memory_of_rank(task.model, layout, task.batch, stage);
  const auto bytes = directions_of_step(task.model, layout, task.batch, stage);
  MeasuredRank rank;
  rank.rank = stage * layout.dp * layout.tp;
  rank.compute_ms = 1e3 * (time.compute + time.update);
  rank.bytes_at_peak = {
      {"parameters", memory.state},
      {"gradients", memory.state / 2},
      {"optimizer", memory.state / 2},
      {"activations", memory.activations / 2},
      {"buckets", 700},
      {"other", 300}};
  if (layout.tp > 1) rank.calls.push_back({"tp", "all_reduce", layout.tp, 1, 3 * bytes.tensor / 2});
  if (layout.pp > 1) rank.calls.push_back({"pp", "send", layout.pp, 4, 1e6});
  if (layout.fsdp) {
    const double each = 1.5 * bytes.data / 3;
    rank.calls.push_back({"dp", "reduce_scatter", layout.dp, 1, each});
    rank.calls.push_back(
        {"dp", "all_gather", layout.dp, 2, 2 * each / static_cast<double>(layout.dp)});
  } else if (layout.dp > 1) {
    rank.calls.push_back({"dp", "all_reduce", layout.dp, 1, 1.5 * bytes.data / 2});
  }
  return {task.cluster.ranks, {rank}};
}

void check_fit(Task task, const Layout& layout, int64_t stage) {
  task.microbatches = layout.microbatches;
  task.model.update_ns = 3;
  task.model.layer_us = 50;
  fit(task, run_of(task, layout, stage));
  CHECK(task.cluster.operations == Approx(2.5e9));
  const auto& corrections = task.model.corrections;
  CHECK(corrections.state == Approx(2));
  CHECK(corrections.activations == Approx(0.5));
  CHECK(corrections.beside == Approx(1000));
  CHECK(corrections.tensor_bytes == Approx(layout.tp > 1 ? 3 : 1));
  CHECK(corrections.data_bytes == Approx(layout.dp > 1 ? 1.5 : 1));
}

}  // namespace

TEST_CASE("the model is fitted to a run in any mesh", "[pure]") {
  check_fit(small_task(8), mesh(8, 1, 1), 0);
  check_fit(small_task(8), mesh(4, 2, 1), 0);
  check_fit(small_task(8), mesh(2, 2, 2, 4), 1);
  auto sharded = mesh(4, 2, 1, 2);
  sharded.fsdp = true;
  check_fit(small_task(8), sharded, 0);
}

TEST_CASE("corrections change memory and times of each mesh", "[pure]") {
  const auto task = small_task(8);
  auto model = task.model;
  model.corrections = {2, 3, 1000, 4, 5};
  const auto layout = mesh(4, 2, 1);
  const auto before = memory_of(task.model, layout, 16), after = memory_of(model, layout, 16);
  CHECK(after.state == Approx(2 * before.state));
  CHECK(after.activations == Approx(3 * before.activations));
  CHECK(after.total() == Approx(after.state + after.activations + 1000));
  auto cluster = task.cluster;
  cluster.host.latency = cluster.network.latency = 0;
  cluster.overlap = 0;
  const auto slow = step_time(model, cluster, layout, 16);
  const auto fast = step_time(task.model, cluster, layout, 16);
  CHECK(slow.tensor == Approx(4 * fast.tensor));
  CHECK(slow.data == Approx(5 * fast.data));
  CHECK(slow.compute == Approx(fast.compute));
}

TEST_CASE("a report of one rank, or of several, is read", "[pure]") {
  const std::string rank =
      "\"rank\": 5, \"step\": 1, \"peak_bytes\": {\"activations\": 9}, \"bytes_at_peak\": "
      "{\"activations\": 4, \"other\": 1e3}, \"total_peak_bytes\": 4, \"collectives\": [{\"axis\": "
      "\"dp\", \"kind\": \"all_reduce\", \"ranks\": 8, \"calls\": 2, \"bytes\": 96}], "
      "\"compute_ms\": 0.5";
  const auto one = parse_measured("f", "{\"world_size\": 16, " + rank + ", \"faults\": []}\n");
  CHECK(one.world_size == 16);
  REQUIRE(one.ranks.size() == 1);
  CHECK(one.ranks[0].rank == 5);
  CHECK(one.ranks[0].compute_ms == 0.5);
  CHECK(one.ranks[0].bytes_at_peak.at("other") == 1000);
  REQUIRE(one.ranks[0].calls.size() == 1);
  CHECK(one.ranks[0].calls[0].axis == "dp");
  CHECK(one.ranks[0].calls[0].ranks == 8);
  CHECK(one.ranks[0].calls[0].bytes == 96);
  const auto two =
      parse_measured("f", "{\"world_size\": 16, \"ranks\": [{" + rank + "},\n{" + rank + "}]}");
  CHECK(two.ranks.size() == 2);
}

TEST_CASE("a report that is none is named", "[pure]") {
  for (const auto& [text, said] : std::vector<std::pair<std::string, std::string>>{
           {"", "expected { at byte 0 of JSON, got its end"},
           {"{", "expected \" at byte 1 of JSON"},
           {"{}", "expected \"world_size\", got none"},
           {"{\"world_size\": 2}", "expected \"rank\", got none"},
           {"{\"world_size\": 2, \"ranks\": []}", "expected a rank, got none"},
           {"{\"world_size\": 2} x", "expected the end at byte 18 of JSON, got \"x\""},
           {"{\"world_size\": 2, \"x\": " + std::string(1 << 20, '['), "expected fewer levels"},
           {"{\"world_size\": 2.5}", "expected an integer"},
           {"{\"compute_ms\": nan}", "expected a number"},
           {"{\"exit_code\": 9, \"faults\": []}", "expected \"world_size\""}}) {
    CAPTURE(text);
    CHECK_THROWS_WITH(
        parse_measured("f.json", text), ContainsText("--measured: f.json: ") &&
                                            ContainsText(said) && ContainsText("ddprun --pretend"));
  }
}

TEST_CASE("a run of another job is an error", "[pure]") {
  auto task = small_task(8);
  auto job = run_of(task, mesh(4, 2, 1), 0);
  job.world_size = 16;
  CHECK_THROWS_WITH(
      fit(task, job),
      ContainsText("expected a run of --ranks 8") && ContainsText("8 x 2 x 1 of 16"));
  job = run_of(task, mesh(4, 1, 2), 0);
  CHECK_THROWS_WITH(fit(task, job), ContainsText("expected --microbatches"));
  job = run_of(task, mesh(8, 1, 1), 0);
  job.ranks[0].compute_ms = 0;
  CHECK_THROWS_WITH(fit(task, job), ContainsText("expected more computation"));
}
