// The peak memory of a rank with a sharded optimizer.

#include <ddp/collectives.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "support/live_bytes.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using testing::Rank;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kLayers = 160;
constexpr int64_t kWidth = 256;
constexpr double kBytes = 4.0 * kLayers * kWidth * (kWidth + 1);  // bytes of all parameters
constexpr double kBucketMb = 0.5;

torch::nn::Sequential make_deep_net() {
  torch::nn::Sequential net;
  for (int layer = 0; layer < kLayers; ++layer) net->push_back(torch::nn::Linear(kWidth, kWidth));
  return net;
}

/// Makes a model and an optimizer, and trains. Measures the third step and later ones: before, the
/// wrapper builds its buckets, and rebuilds them in another order.
void train(const Rank& self, int stage, testing::PeakOfAllThreads& peak) {
  DistributedDataParallel<torch::nn::Sequential> model(
      make_deep_net(), DistributedDataParallelOptions()
                           .process_group(self.group)
                           .bucket_cap_mb(kBucketMb)
                           .gradient_as_bucket_view(true));
  ZeroRedundancyOptimizer<AdamW> optimizer(model, AdamWOptions(1e-3), ZeroOptions().stage(stage));
  for (int step = 0; step < 4; ++step) {
    barrier(self.group);
    if (step == 2 && self.rank == 0) peak.reset();
    barrier(self.group);
    optimizer.zero_grad();
    model->forward(torch::ones({1, kWidth})).square().mean().backward();
    optimizer.step();
  }
}

}  // namespace

TEST_CASE("a sharded optimizer needs the memory of its part", "[zero][ranks][gloo]") {
  const auto [stage, world] = GENERATE(table<int, int>({{1, 2}, {2, 4}}));
  // In float32 a parameter, its gradient and each of AdamW's two averages take four bytes.
  const double whole = stage == 1 ? 2 : 1;
  const double divided = stage == 1 ? 2 : 3;
  const double bucket = stage == 1 ? 0 : kBucketMb * 1024 * 1024;
  const double expected = whole * kBytes + divided * kBytes / world + bucket;
  testing::PeakOfAllThreads peak;
  testing::run_ranks<int>(
      world, [&, stage = stage](const Rank& self) { return train(self, stage, peak), 0; });
  const auto part_of_expected = static_cast<double>(peak.bytes()) / world / expected;
  CAPTURE(stage, world, expected / kBytes);
  CHECK(part_of_expected < 1.03);
  CHECK(part_of_expected > 0.97);  // less would mean that something is not counted
}

}  // namespace ddp
