// The actions of a pipeline, when they begin and end, and what is computed from it.
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/pipeline_beside.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

TEST_CASE("an action begins when its tensors have come") {
  constexpr std::chrono::milliseconds kTakes{60};
  const auto begins = run_ranks<double>(2, [&](const Rank& self) {
    const RunLayer layer(self.rank, [&](Layer& own, const at::Tensor& x) {
      if (self.rank == 0) std::this_thread::sleep_for(kTakes);
      return own->forward(x);
    });
    ddp::PipelineStage pipeline(
        layer, self.rank, 2, pipeline_loss,
        ddp::PipelineOptions().process_group(self.group).microbatches(1));
    const auto batch = pipeline_batch(2, 0);
    std::vector<at::Tensor> inputs;
    if (self.rank == 0) inputs.push_back(batch.input);
    pipeline.step(inputs, self.rank == 1 ? batch.target : at::Tensor());
    const auto& step = pipeline.stats().steps.at(0);
    return static_cast<double>(step.begin_unix_ns) / 1e6 + step.actions.at(0).begin_ms;
  });
  CHECK(begins[1] - begins[0] > 0.9 * static_cast<double>(kTakes.count()));
}

TEST_CASE("the bubble is the ranks' time without actions") {
  ddp::PipelineStats stats;
  // Of 2 ranks and 20 ms: 12 ms and 8 ms.
  stats.steps.push_back({0, 1, 0, 20, {{{'F', 0, 0}, 0, 0, 5}, {{'B', 0, 0}, 0, 13, 20}}});
  stats.steps.push_back({1, 1, 0, 14, {{{'F', 0, 0}, 1, 5, 9}, {{'B', 0, 0}, 1, 9, 13}}});
  CHECK(stats.bubble() == Approx(0.5));
  CHECK(ddp::summary(stats) == "step 20.0 ms, bubble 50.0%");
  CHECK(ddp::summary(ddp::PipelineStats{}).empty());
}

TEST_CASE("stats() has the actions of the schedule, and write_trace a row a stage") {
  const auto texts = run_ranks<std::string>(2, [](const Rank& self) -> std::string {
    Beside run(self, {kInterleaved, 2, 3});
    run.train(6, 0);
    run.train(6, 1);
    const auto& own = run.pipeline.stats();
    if (own.steps.size() != 2 || own.steps[1].step != 2) return "steps";
    const auto list = run.pipeline.schedule();
    double time = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      const auto& [action, stage, begin, end] = own.steps[1].actions.at(i);
      if (action.kind != list[i].kind || action.microbatch != list[i].microbatch) return "action";
      if (stage != list[i].chunk * 2 + self.rank) return "stage";
      if (begin < time || end < begin || end > own.steps[1].total_ms) return "times";
      time = end;
    }
    const auto all = ddp::all_gather_stats(own, self.group);
    if (all.steps.size() != 4 || all.bubble() <= 0 || all.bubble() >= 1) return "bubble";
    if (all.steps[3].actions.at(1).begin_ms <= 0) return "gathered";
    const TemporaryFolder folder;
    ddp::write_trace(folder.file("trace.json"), all);
    const auto trace = read_bytes(folder.file("trace.json"));
    const auto count = [&](const std::string& text) {
      int64_t found = 0;
      for (auto at = trace.find(text); at != std::string::npos; at = trace.find(text, at + 1)) {
        ++found;
      }
      return found;
    };
    if (count("\"name\":\"thread_name\"") != 4 || count("stage 3 on rank 1") != 1) return "rows";
    if (count("\"name\":\"B2\"") != 8 || count("\"ph\":\"X\"") != 48) return "boxes";
    return ddp::summary(all).substr(0, 5);
  });
  CHECK(texts == std::vector<std::string>{"step ", "step "});
}

TEST_CASE("schedule() is the rank's list") {
  const auto lists = run_ranks<std::string>(2, [](const Rank& self) {
    Beside run(self, {kOneFOneB, 1, 4});
    std::string list;
    for (const auto& action : run.pipeline.schedule()) {
      list += action.kind + std::to_string(action.microbatch) + " ";
    }
    return list;
  });
  CHECK(lists[0] == "F0 F1 B0 F2 B1 F3 B2 B3 ");
  CHECK(lists[1] == "F0 B0 F1 B1 F2 B2 F3 B3 ");
}

}  // namespace
