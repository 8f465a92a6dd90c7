// The parts of the example, on ranks that are threads.
#include <vector>

#include <ddp/sampler.h>
#include <torch/torch.h>

#include "examples/common/data/idx.h"
#include "examples/common/data/image_dataset.h"
#include "examples/mnist/training.h"
#include "support/compare.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace {

using ddp::testing::Rank;
using ddp::testing::run_ranks;

constexpr size_t kSteps = 20;

struct Course {
  std::vector<double> losses;  // of this rank's batches, each before its step
  std::vector<at::Tensor> parameters;
};

// Networks with equal weights, made one after the other: ranks are threads, and share one
// generator.
std::vector<mnist::Net> equal_networks(int count) {
  std::vector<mnist::Net> networks;
  for (int i = 0; i < count; ++i) {
    torch::manual_seed(1);
    networks.emplace_back(mnist::Dropout{0, 0});
  }
  return networks;
}

Course train(const Rank& self, const mnist::Net& net, size_t batch_size) {
  const auto images = examples::read_mnist(MNIST_DEFAULT_DATA, "train");
  examples::ImageDataset dataset(images, examples::measure_pixels(images.images));
  ddp::DistributedSampler sampler(
      *dataset.size(),
      ddp::DistributedSamplerOptions().num_replicas(self.size).rank(self.rank).seed(1));
  auto loader = torch::data::make_data_loader(std::move(dataset), sampler, batch_size);
  mnist::Model model(net, ddp::DistributedDataParallelOptions().process_group(self.group));
  // Not Adam, which divides a gradient that should be zero by its own size: a rounding error would
  // become a whole step.
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.05);

  Course course;
  for (auto& batch : *loader) {
    course.losses.push_back(mnist::train_step(model, optimizer, batch).mean_loss());
    if (course.losses.size() == kSteps) break;
  }
  course.parameters = net->parameters();
  return course;
}

std::vector<Course> train_on(int size, size_t batch_size) {
  const auto networks = equal_networks(size);
  return run_ranks<Course>(
      size, [&](const Rank& self) { return train(self, networks[self.rank], batch_size); });
}

}  // namespace

TEST_CASE("2 ranks with batch 32 follow 1 rank with batch 64", "[examples][ranks]") {
  const auto one = train_on(1, 64).front();
  const auto two = train_on(2, 32);

  REQUIRE(one.losses.size() == kSteps);
  CHECK(one.losses.back() < 0.9 * one.losses.front());  // it does learn
  for (size_t step = 0; step < kSteps; ++step) {
    CAPTURE(step);
    // The batches of both ranks together are the batch of the one rank, because ranks take turns in
    // one order.
    const double mean = (two[0].losses[step] + two[1].losses[step]) / 2;
    CHECK(mean == Approx(one.losses[step]).epsilon(1e-5));
  }
  CHECK(ddp::testing::all_equal(two[0].parameters, two[1].parameters));
  CHECK(ddp::testing::all_close(two[0].parameters, one.parameters, 0, 1e-5));
}

TEST_CASE("the ranks' parts of the test split hold every sample once", "[examples][ranks]") {
  const int size = GENERATE(1, 2, 7);
  CAPTURE(size);
  auto data = examples::read_mnist(MNIST_DEFAULT_DATA, "t10k");
  data.images = data.images.slice(0, 0, 20);
  data.labels = data.labels.slice(0, 0, 20);
  examples::ImageDataset dataset(data, examples::measure_pixels(data.images));
  auto net = equal_networks(1).front();

  const auto whole = mnist::evaluate(net, dataset, 0, 1);
  mnist::Tally sum;
  for (int rank = 0; rank < size; ++rank) {
    const auto part = mnist::evaluate(net, dataset, rank, size);
    sum.loss_sum += part.loss_sum;
    sum.correct += part.correct;
    sum.samples += part.samples;
  }
  CHECK(whole.samples == 20);
  CHECK(sum.samples == 20);
  CHECK(sum.correct == whole.correct);
  CHECK(sum.loss_sum == Approx(whole.loss_sum));
}

TEST_CASE("accuracy has the format that the program prints", "[examples][pure]") {
  CHECK(mnist::Tally{0, 355, 360}.accuracy() == "98.61% (355/360)");
  CHECK(mnist::Tally{0, 360, 360}.accuracy() == "100.00% (360/360)");
  CHECK(mnist::Tally{}.accuracy() == "0.00% (0/0)");
}
