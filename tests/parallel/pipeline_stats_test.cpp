// When a pipeline's actions begin and end, and what is computed from it.
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/pipeline_net.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

struct SlowImpl : torch::nn::Module {
  explicit SlowImpl(int64_t k, std::chrono::milliseconds takes)
      : layer(register_module("layer", Layer(k))), takes(takes) {}
  at::Tensor forward(const at::Tensor& x) {
    std::this_thread::sleep_for(takes);
    return layer->forward(x);
  }
  Layer layer;
  std::chrono::milliseconds takes;
};
TORCH_MODULE(Slow);

TEST_CASE("an action begins when its tensors have come") {
  constexpr std::chrono::milliseconds kTakes{60};
  const auto begins = run_ranks<double>(2, [&](const Rank& self) {
    const Slow layer(self.rank, self.rank == 0 ? kTakes : std::chrono::milliseconds(0));
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

}  // namespace
