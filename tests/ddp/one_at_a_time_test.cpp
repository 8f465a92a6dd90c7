// Pipelines over a backend that moves one message at a time in a group, as NCCL does with those
// that are larger than its buffers.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/pipeline_beside.h"
#include "support/one_at_a_time.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::testing {
namespace {

RanksOptions one_at_a_time() { return testing::over(register_one_at_a_time()); }

}  // namespace

TEST_CASE("a pipeline trains where messages go one at a time", "[one_at_a_time][ranks]") {
  const int ranks = GENERATE(2, 3);
  CAPTURE(ranks);
  const auto differences = run_ranks<double>(ranks, one_at_a_time(), [](const Rank& self) {
    double largest = 0;
    for (const auto& plan :
         {Plan{kGPipe, 1, 4}, Plan{kGPipe, 2, 3}, Plan{kOneFOneB, 1, 1}, Plan{kOneFOneB, 1, 4},
          Plan{kInterleaved, 1, 4}, Plan{kInterleaved, 2, 5}}) {
      Beside run(self, plan);
      for (int64_t s = 0; s < 2; ++s) {
        largest = std::max(largest, run.train(2 * plan.microbatches + s, s));
        const auto input = pipeline_batch(3, 7).input;
        const auto output = run.pipeline.eval(
            run.is_first() ? std::vector<at::Tensor>{input} : std::vector<at::Tensor>{});
        if (run.is_last()) {
          largest = std::max(largest, largest_difference({run.whole.forward(input)}, {output}));
        }
      }
    }
    return largest;
  });
  for (const auto difference : differences) CHECK(difference < 1e-12);
}

TEST_CASE("a pipeline has no groups for its messages", "[one_at_a_time][ranks]") {
  const auto made_by = [](const Plan& plan) {
    const auto before = one_at_a_time_groups();
    run_ranks<int>(2, one_at_a_time(), [&](const Rank& self) {
      const Beside run(self, plan);
      return 0;
    });
    return (one_at_a_time_groups() - before) / 2;
  };
  CHECK(made_by({kGPipe, 1, 4}) == 1);
  CHECK(made_by({kOneFOneB, 1, 4}) == 1);
  CHECK(made_by({kInterleaved, 2, 4}) == 1);
}

TEST_CASE("a failure ends waits for messages of a pipeline", "[one_at_a_time][ranks][errors]") {
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of_ranks(3, one_at_a_time(), [](const Rank& self) {
    int losses = 0;
    const auto loss = [&](const at::Tensor& output, const at::Tensor& target) {
      if (++losses == 2) throw std::runtime_error("no loss today");
      return pipeline_loss(output, target);
    };
    PipelineStage<Layer> pipeline(
        Layer(self.rank), self.rank, self.size, loss, options_of(self, kOneFOneB, 4));
    const auto batch = pipeline_batch(8, 0);
    pipeline.step(
        self.rank == 0 ? std::vector<at::Tensor>{batch.input} : std::vector<at::Tensor>{},
        self.rank == 2 ? batch.target : at::Tensor());
  });
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
  CHECK_THAT(errors, Each(ContainsText("F1 of stage 2") && ContainsText("no loss today")));
}

}  // namespace ddp::testing
