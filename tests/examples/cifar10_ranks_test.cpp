// The parts of CIFAR-10's example, and its training on ranks that are threads.
#include <vector>

#include <torch/torch.h>

#include "examples/cifar10/shapes.h"
#include "examples/cifar10/training.h"
#include "examples/common/data/cifar.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using cifar10::Net;
using cifar10::NetOptions;
using cifar10::Training;
using namespace ddp::testing;
using examples::LabeledImages;

constexpr int64_t kClasses = 10;

NetOptions tiny(bool batch_norm) { return {{4, 8}, 1, batch_norm}; }

cifar10::Options options_for(size_t batch_size, int64_t epochs) {
  cifar10::Options options;
  options.batch_size = batch_size;
  options.epochs = epochs;
  return options;
}

// Networks with equal weights, made one after the other: ranks are threads, and share one
// generator.
std::vector<Net> equal_networks(int count, const NetOptions& options) {
  std::vector<Net> networks;
  for (int i = 0; i < count; ++i) {
    torch::manual_seed(1);
    networks.emplace_back(options);
    networks.back()->to(at::kDouble);
  }
  return networks;
}

// Returns the accuracy of a least-squares fit of the classes to the pixels.
double linear_accuracy(const LabeledImages& train, const LabeledImages& test) {
  const auto input = [](const LabeledImages& data) {
    const auto pixels = data.images.flatten(1).to(at::kFloat).div(255).sub(0.5);
    return at::cat({pixels, at::ones({pixels.size(0), 1})}, 1);
  };
  const auto x = input(train);
  // Ridge regression in its dual form, because there are fewer images than pixels.
  const auto gram = x.mm(x.t()) + 30 * at::eye(x.size(0));
  const auto targets = at::one_hot(train.labels, kClasses).to(at::kFloat);
  const auto weights = x.t().mm(at::linalg_solve(gram, targets));
  const auto found = input(test).mm(weights).argmax(1);
  return found.eq(test.labels).to(at::kFloat).mean().item<double>();
}

}  // namespace

TEST_CASE("drawn shapes are a data set in CIFAR-10's format", "[examples][pure]") {
  const auto drawn = cifar10::draw_shapes(100, 7);
  CHECK(at::equal(drawn.images, cifar10::draw_shapes(100, 7).images));
  CHECK_FALSE(at::equal(drawn.images, cifar10::draw_shapes(100, 8).images));
  CHECK(at::equal(at::bincount(drawn.labels), at::full({kClasses}, 10, at::kLong)));

  const TemporaryFolder folder;
  cifar10::write_cifar10(drawn, folder.file("test_batch.bin"));
  const auto read = examples::read_cifar10(folder.path(), "test");
  CHECK(at::equal(read.images, drawn.images));
  CHECK(at::equal(read.labels, drawn.labels));
  CHECK_THAT(
      error_of([&] { cifar10::write_cifar10(drawn, folder.file("missing/test_batch.bin")); }),
      ContainsText(folder.file("missing/test_batch.bin")));
}

TEST_CASE("a linear classifier does not learn the drawn shapes", "[examples][pure]") {
  const auto train = cifar10::draw_shapes(2000, 1);
  CHECK(linear_accuracy(train, train) > 0.9);  // it does memorize these images
  CHECK(linear_accuracy(train, cifar10::draw_shapes(500, 2)) < 0.6);
}

TEST_CASE("the rate warms up, and falls along a cosine", "[examples][pure]") {
  CHECK(cifar10::rate_of_step(0, 1000) == Approx(1 / 101.0));
  CHECK(cifar10::rate_of_step(100, 1000) == Approx(1));
  CHECK(cifar10::rate_of_step(550, 1000) == Approx(0.5));
  CHECK(cifar10::rate_of_step(999, 1000) < 1e-5);
  CHECK(cifar10::rate_of_step(0, 1) > 0);
}

TEST_CASE("an image's crop depends only on seed, epoch and index", "[examples][pure]") {
  const auto data = cifar10::draw_shapes(40, 1);
  const auto channels = examples::measure_channels(data.images);
  const auto epoch = std::make_shared<std::atomic<int64_t>>(0);
  cifar10::Images images(data);
  const auto augmented = [&](std::vector<size_t> indices, int64_t seed = 1) {
    return cifar10::Augmentation(channels, seed, epoch)(images.get_batch(indices)).images;
  };
  const auto first = augmented({3, 4, 5});
  CHECK(at::equal(augmented({5, 3})[1], first[0]));
  CHECK_FALSE(at::equal(augmented({3}, 2)[0], first[0]));
  *epoch = 1;
  CHECK_FALSE(at::equal(augmented({3})[0], first[0]));

  // Only borders are lost: every crop holds the image's middle, as it is or mirrored.
  const auto whole = examples::prepare_images(data.images, channels, 32);
  std::vector<size_t> all(40);
  for (size_t i = 0; i < all.size(); ++i) all[i] = i;
  const auto crops = augmented(all);
  int mirrored = 0;
  for (int64_t i = 0; i < 40; ++i) {
    const auto found = [&](const at::Tensor& image) {
      const auto middle = image.slice(1, 8, 24).slice(2, 8, 24);
      for (int64_t y = 4; y <= 12; ++y) {
        for (int64_t x = 4; x <= 12; ++x) {
          if (at::equal(crops[i].slice(1, y, y + 16).slice(2, x, x + 16), middle)) return true;
        }
      }
      return false;
    };
    const bool flipped = found(whole[i].flip(2));
    mirrored += flipped;
    CHECK((flipped || found(whole[i])));
  }
  CHECK(mirrored > 8);
  CHECK(mirrored < 32);
}

TEST_CASE("2 ranks with halves train as 1 with the whole batch", "[examples][ranks]") {
  const bool batch_norm = GENERATE(false, true);
  const auto data = cifar10::draw_shapes(80, 1);
  // Two batches of 40: in the second epoch every image has another crop and position.
  constexpr size_t kBatch = 40;
  constexpr int64_t kEpochs = 2;
  const auto start = copies_of(equal_networks(1, tiny(batch_norm)).front()->parameters());
  const auto train = [&](int size) {
    return run_ranks<std::vector<at::Tensor>>(size, [&](const Rank& self) {
      auto shape = tiny(batch_norm);
      shape.sync_batch_norm = true;
      shape.group = self.group;
      Net net(shape);
      net->to(at::kDouble);
      for (size_t i = 0; i < start.size(); ++i) net->parameters()[i].data().copy_(start[i]);
      Training training(options_for(kBatch / size, kEpochs), net, data, self.group);
      for (int64_t epoch = 0; epoch < kEpochs; ++epoch) training.epoch(epoch);
      return copies_of(net->parameters());
    });
  };
  const auto one = train(1).front();
  const auto two = train(2);
  CHECK(all_equal(two[0], two[1]));
  CHECK(largest_difference(two[0], one) < 1e-9);
  CHECK(largest_difference(one, start) > 1e-3);
}

TEST_CASE("a resumed training ends in the same bits", "[examples][ranks]") {
  const auto data = cifar10::draw_shapes(60, 1);
  const TemporaryFolder folder;
  constexpr int kRanks = 2;
  constexpr int64_t kEpochs = 3;
  const auto networks = equal_networks(2 * kRanks, tiny(/*batch_norm=*/true));
  using Ends = std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>;
  const auto ends = run_ranks<Ends>(kRanks, [&](const Rank& self) {
    auto options = options_for(10, kEpochs);
    options.checkpoint = folder.path();
    auto net = networks[self.rank];
    Training whole(options, net, data, self.group);
    whole.epoch(0);
    whole.checkpointer()->save(1);
    whole.checkpointer()->wait();
    for (int64_t epoch = 1; epoch < kEpochs; ++epoch) whole.epoch(epoch);

    auto other = networks[kRanks + self.rank];
    Training resumed(options, other, data, self.group);
    for (int64_t epoch = *resumed.checkpointer()->load_latest(); epoch < kEpochs; ++epoch) {
      resumed.epoch(epoch);
    }
    return Ends{state_of(*net), state_of(*other)};
  });
  for (const auto& [whole, resumed] : ends) CHECK(all_equal(whole, resumed));
}

TEST_CASE("a training that left within an epoch ends in the same bits", "[examples][ranks]") {
  const auto data = cifar10::draw_shapes(60, 1);
  const TemporaryFolder folder;
  constexpr int kRanks = 2;
  const auto networks = equal_networks(2 * kRanks, tiny(/*batch_norm=*/true));
  struct End {
    std::vector<at::Tensor> whole, resumed;
    int64_t samples = 0;
    int64_t steps = 0;
  };
  const auto ends = run_ranks<End>(kRanks, [&](const Rank& self) {
    auto options = options_for(10, 2);
    options.checkpoint = folder.path();
    auto net = networks[self.rank];
    Training whole(options, net, data, self.group);
    whole.epoch(0);
    whole.epoch(1, [&](int64_t done, int64_t) {
      if (done != 2) return;
      whole.checkpointer()->save(1);
      whole.checkpointer()->wait();
    });

    auto other = networks[kRanks + self.rank];
    Training resumed(options, other, data, self.group);
    const int64_t epoch = *resumed.checkpointer()->load_latest();
    const int64_t steps = resumed.steps_of_epoch();
    const auto tally = resumed.epoch(epoch);
    return End{state_of(*net), state_of(*other), tally.samples, steps};
  });
  for (const auto& end : ends) {
    CHECK(end.steps == 2);
    CHECK(end.samples == 30);  // of the whole epoch
    CHECK(all_equal(end.whole, end.resumed));
  }
}
