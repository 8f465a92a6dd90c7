// DiLoCo on handwritten digits, beside averaged gradients, with regions that are threads.
#include <ddp/diloco.h>

#include <memory>
#include <optional>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <ddp/sampler.h>
#include <torch/torch.h>

#include "examples/common/data/digits.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace diloco_ranks_test {

using ddp::testing::Rank;
using ddp::testing::run_ranks;

constexpr int kRegions = 2;
constexpr int64_t kSteps = 2000;

/// Networks with equal weights, made one after the other: ranks share one generator.
std::vector<torch::nn::Sequential> equal_networks(const examples::Digits& digits) {
  examples::DigitsOptions options;
  options.hidden = 64;
  std::vector<torch::nn::Sequential> networks;
  for (int i = 0; i < kRegions; ++i) networks.push_back(make_classifier(digits, options));
  return networks;
}

double loss_of(torch::nn::Sequential& net, const examples::Digits& digits) {
  const torch::NoGradGuard no_grad;
  return torch::cross_entropy_loss(net->forward(digits.pixels), digits.labels).item<double>();
}

/// \param options  nothing: gradients are averaged in every step.
/// \return  the loss of all training images at the end.
double train(const std::optional<ddp::DiLoCoOptions>& options) {
  const auto digits = examples::read_digits({}, "train");
  const auto networks = equal_networks(digits);
  return run_ranks<double>(kRegions, [&](const Rank& self) {
    auto net = networks[static_cast<size_t>(self.rank)];
    const auto group = ddp::DistributedDataParallelOptions().process_group(self.group);
    std::unique_ptr<ddp::DistributedDataParallel<torch::nn::Sequential>> model;
    std::unique_ptr<ddp::DiLoCo> diloco;
    if (!options) {
      model = std::make_unique<ddp::DistributedDataParallel<torch::nn::Sequential>>(net, group);
    } else {
      auto own = *options;
      diloco = std::make_unique<ddp::DiLoCo>(net->parameters(), own.regions(self.group));
    }
    torch::optim::AdamW optimizer(net->parameters(), 1e-3);
    ddp::DistributedSampler sampler(
        static_cast<size_t>(digits.size()),
        ddp::DistributedSamplerOptions().num_replicas(kRegions).rank(self.rank).advance_epoch(
            true));
    for (int64_t step = 0; step < kSteps; ++step) {
      auto indices = sampler.next(32);
      if (!indices) {
        sampler.reset();
        indices = sampler.next(32);
      }
      const auto batch = digits.at(*indices);
      optimizer.zero_grad();
      const auto output = model ? (*model)->forward(batch.pixels) : net->forward(batch.pixels);
      torch::cross_entropy_loss(output, batch.labels).backward();
      optimizer.step();
      if (diloco) diloco->average_parameters(net->parameters());
    }
    if (diloco) diloco->finish();
    return loss_of(net, digits);
  })[0];
}

TEST_CASE("DiLoCo's loss after the same steps is that of averaged gradients", "[examples][ranks]") {
  const double averaged = train({});
  const auto options = ddp::DiLoCoOptions().sync_every(500);
  const double in_one_piece = train(options);
  const double streaming =
      train(ddp::DiLoCoOptions(options).fragments(4).overlap(5).wire(ddp::DiLoCoWire::Int8));
  CAPTURE(averaged, in_one_piece, streaming);
  CHECK(in_one_piece <= 1.01 * averaged);
  CHECK(streaming <= 1.01 * averaged);
}

}  // namespace diloco_ranks_test
