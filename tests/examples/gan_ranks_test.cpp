// The parts of the GAN example, and its training on ranks that are threads.
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "examples/common/data/idx.h"
#include "examples/gan/frechet_distance.h"
#include "examples/gan/picture.h"
#include "examples/gan/training.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

// A named namespace, because other examples also have a Training that ranks use.
namespace gan {
namespace {

using ddp::testing::all_equal;
using ddp::testing::error_of;
using ddp::testing::largest_difference;
using ddp::testing::Rank;
using ddp::testing::run_ranks;
using ddp::testing::TemporaryFolder;
using Tensors = std::vector<at::Tensor>;

std::optional<Options> parse_gan(std::vector<const char*> arguments, std::ostream& help) {
  arguments.insert(arguments.begin(), "gan");
  return parse_options(static_cast<int>(arguments.size()), arguments.data(), help);
}

// Networks with equal weights, made one after the other: ranks are threads, and share one
// generator.
std::vector<Networks> equal_networks(int count, const NetworkOptions& options) {
  std::vector<Networks> all;
  for (int i = 0; i < count; ++i) {
    torch::manual_seed(1);
    all.push_back({make_generator(options), make_discriminator(options)});
    all.back().generator->to(at::kDouble);
    all.back().discriminator->to(at::kDouble);
  }
  return all;
}

NetworkOptions without_batch_norm() {
  NetworkOptions options;
  options.batch_norm = false;
  return options;
}

// Copies the present parameters and buffers of both networks.
Tensors state_of(const Networks& networks) {
  Tensors state;
  for (const auto& network : {networks.generator, networks.discriminator}) {
    for (const auto& tensor : ddp::testing::state_of(*network)) state.push_back(tensor);
  }
  return state;
}

examples::LabeledImages digits() { return examples::read_mnist(GAN_DEFAULT_DATA, "train"); }

}  // namespace

TEST_CASE("each option of gan reaches its field", "[examples][pure]") {
  std::ostringstream help;
  const auto options = parse_gan(
      {"--epochs", "3", "--batch-size", "8", "--lr", "0.5", "--seed", "7", "--backend", "gloo",
       "--data", "/d", "--picture", "p.pgm", "--ema", "0.25"},
      help);
  REQUIRE(options);
  CHECK(options->epochs == 3);
  CHECK(options->batch_size == 8);
  CHECK(options->lr == 0.5);
  CHECK(options->seed == 7);
  CHECK(options->backend == "gloo");
  CHECK(options->data == "/d");
  CHECK(options->picture == "p.pgm");
  CHECK(options->ema == 0.25);
  CHECK_FALSE(parse_gan({"--help"}, help));
  CHECK_THAT(help.str(), ContainsText("--picture"));
  for (const char* option : {"--epochs", "--batch-size", "--lr"}) {
    CHECK_THAT(error_of<UsageError>([&] { parse_gan({option, "0"}, help); }), ContainsText(option));
  }
}

TEST_CASE("the distance of sets of images is that of normal distributions", "[examples][pure]") {
  torch::manual_seed(1);
  const auto images = at::rand({300, 1, 4, 4}, at::kDouble);
  const auto centred = images - images.mean(0);
  const double variance = at::cov(images.flatten(1).t()).trace().item<double>();
  CHECK(frechet_distance(images, images) == Approx(0).margin(1e-9));
  CHECK(frechet_distance(images, images + 2) == Approx(16 * 4));
  CHECK(frechet_distance(centred, 3 * centred) == Approx(4 * variance));
  CHECK_THAT(
      error_of([&] { frechet_distance(images, images.narrow(0, 0, 1)); }),
      ContainsText("expected 2 or more images, got 300 and 1."));
  // One image many times: the mean is right, but there is no variety.
  const auto collapsed = images.mean(0, /*keepdim=*/true).expand_as(images);
  CHECK(frechet_distance(collapsed, images) == Approx(variance));
}

TEST_CASE("samples are laid out in rows, and written as PGM", "[examples][pure]") {
  const auto images =
      at::stack({at::full({1, 8, 16}, -1.0), at::full({1, 8, 16}, 0.0), at::full({1, 8, 16}, 1.0)});
  const auto picture = picture_of(images, /*columns=*/2);
  // Each pixel is 4 x 4, each image has a margin of 2.
  REQUIRE(picture.sizes().vec() == std::vector<int64_t>{2 * 36, 2 * 68});
  const auto image_at = [&](int64_t y, int64_t x) {
    return picture.narrow(0, y + 2, 32).narrow(1, x + 2, 64);
  };
  CHECK(image_at(0, 0).eq(0).all().item<bool>());
  CHECK(image_at(0, 68).eq(128).all().item<bool>());
  CHECK(image_at(36, 0).eq(255).all().item<bool>());
  CHECK(picture[0][0].item<int>() == 64);
  CHECK(image_at(36, 68).eq(64).all().item<bool>());

  const TemporaryFolder folder;
  const auto path = folder.write("samples.pgm", "of the epoch before");
  write_pgm(path, at::tensor({0, 1, 2, 253, 254, 255}, at::kByte).view({2, 3}));
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  CHECK(bytes == std::string("P5\n3 2\n255\n\0\1\2\xFD\xFE\xFF", 17));
  CHECK(ddp::testing::names_in(folder.path()).size() == 1);
  const auto missing = folder.file("missing/samples.pgm");
  CHECK_THAT(error_of([&] { write_pgm(missing, picture); }), ContainsText(missing));
}

TEST_CASE("the networks fit images of every size", "[examples][pure]") {
  auto random = make_random_generator(1, 0);
  for (const int64_t size : {8, 12, 28}) {
    CAPTURE(size);
    const NetworkOptions options{size};
    const auto images = make_generator(options)->forward(draw_noise(3, random));
    CHECK(images.sizes().vec() == std::vector<int64_t>{3, 1, size, size});
    CHECK(images.abs().max().item<double>() <= 1);
    CHECK(make_discriminator(options)->forward(images).sizes().vec() == std::vector<int64_t>{3});
  }
  // Images of other sizes are resized to the next size.
  const auto raw = at::zeros({2, 9, 30}, at::kByte);
  const auto size = network_size({raw, {}});
  CHECK(size == 12);
  CHECK(to_input(raw, size).sizes().vec() == std::vector<int64_t>{2, 1, 12, 12});
  CHECK(network_size({at::zeros({2, 3, 3}, at::kByte), {}}) == 8);
  CHECK_THAT(error_of([] { make_generator({10}); }), ContainsText("a multiple of 4, got 10."));
}

TEST_CASE("noise depends on the seed and on the rank", "[examples][pure]") {
  const auto draw = [](int64_t seed, int64_t stream) {
    auto random = make_random_generator(seed, stream);
    return draw_noise(4, random);
  };
  CHECK(at::equal(draw(1, 1), draw(1, 1)));
  CHECK_FALSE(at::equal(draw(1, 1), draw(1, 2)));
  CHECK_FALSE(at::equal(draw(1, 1), draw(2, 1)));
}

TEST_CASE("2 ranks with halves of a batch train both networks as 1 rank", "[examples][ranks]") {
  constexpr int64_t kBatch = 16;
  constexpr int64_t kSteps = 6;
  const auto images = digits();
  const auto real = to_input(images.images, 8).to(at::kDouble);
  auto random = make_random_generator(1, 0);
  const auto noise = draw_noise(kSteps * kBatch, random).to(at::kDouble);

  struct Result {
    Tensors state;
    Losses last;
  };
  const auto train = [&](int size) {
    const auto networks = equal_networks(size, without_batch_norm());
    return run_ranks<Result>(size, [&](const Rank& self) {
      Training training({}, networks[self.rank], images, self.group);
      const int64_t part = kBatch / size;
      Result result;
      for (int64_t step = 0; step < kSteps; ++step) {
        const int64_t first = step * kBatch + self.rank * part;
        result.last = training.step(real.narrow(0, first, part), noise.narrow(0, first, part));
      }
      result.state = state_of(networks[self.rank]);
      return result;
    });
  };
  const auto start = state_of(equal_networks(1, without_batch_norm()).front());
  const auto one = train(1).front();
  const auto two = train(2);
  CHECK(all_equal(two[0].state, two[1].state));
  CHECK(largest_difference(two[0].state, one.state) < 1e-9);
  CHECK(
      (two[0].last.discriminator + two[1].last.discriminator) / 2 ==
      Approx(one.last.discriminator).epsilon(1e-9));
  CHECK(
      (two[0].last.generator + two[1].last.generator) / 2 ==
      Approx(one.last.generator).epsilon(1e-9));
  for (size_t i = 0; i < start.size(); ++i) {
    CAPTURE(i);
    CHECK((one.state[i] - start[i]).abs().max().item<double>() > 1e-3);  // both networks learn
  }
}

TEST_CASE("a generator's step leaves the discriminator unchanged", "[examples][ranks]") {
  const auto images = digits();
  const auto real = to_input(images.images.narrow(0, 0, 8), 8).to(at::kDouble);
  const auto networks = equal_networks(2, {});
  struct Result {
    size_t generator_passes, discriminator_passes;
    bool trainable;
  };
  const auto results = run_ranks<Result>(2, [&](const Rank& self) {
    Training training({}, networks[self.rank], images, self.group);
    auto random = make_random_generator(1, self.rank);
    for (int step = 0; step < 3; ++step) {
      training.step(real, draw_noise(8, random).to(at::kDouble));
    }
    Result result{
        training.generator()->stats().steps.size(), training.discriminator()->stats().steps.size(),
        true};
    for (const auto& parameter : training.discriminator()->parameters()) {
      result.trainable = result.trainable && parameter.requires_grad();
    }
    return result;
  });
  for (const auto& result : results) {
    // Each network's gradients were averaged once a step, and no discriminator gradients in the
    // generator's step.
    CHECK(result.generator_passes == 3);
    CHECK(result.discriminator_passes == 3);
    CHECK(result.trainable);
  }
}

TEST_CASE("a training of both networks is repeatable to the bit", "[examples][ranks]") {
  auto images = digits();
  images.images = images.images.narrow(0, 0, 40);
  images.labels = images.labels.narrow(0, 0, 40);
  const auto train = [&](int64_t seed) {
    const auto networks = equal_networks(2, {});
    Options options;
    options.seed = seed;
    options.batch_size = 8;
    return run_ranks<Tensors>(2, [&](const Rank& self) {
      Training training(options, networks[self.rank], images, self.group);
      int64_t steps = 0;
      for (int64_t epoch = 0; epoch < 2; ++epoch) {
        training.epoch(epoch, [&](int64_t done, int64_t total) { steps += done == total; });
      }
      TORCH_CHECK(steps == 2, "an epoch's last step is told as such");
      return state_of(networks[self.rank]);
    });
  };
  const auto first = train(1);
  CHECK(all_equal(first[0], first[1]));  // including BatchNorm's statistics
  CHECK(all_equal(train(1)[0], first[0]));
  CHECK_FALSE(all_equal(train(2)[0], first[0]));
}

TEST_CASE(
    "samples of --ema are the averages', and training goes on from its own", "[examples][ranks]") {
  const auto images = digits();
  const auto real = to_input(images.images.narrow(0, 0, 8), 8).to(at::kDouble);
  const auto networks = equal_networks(4, {});
  const auto run = [&](double ema, size_t first) {
    return run_ranks<Tensors>(2, [&, ema, first](const Rank& self) {
      Options options;
      options.ema = ema;
      const auto& own = networks[first + static_cast<size_t>(self.rank)];
      Training training(options, own, images, self.group);
      auto random = make_random_generator(1, 0);
      for (int step = 0; step < 3; ++step) {
        training.step(real, draw_noise(8, random).to(at::kDouble));
      }
      Tensors results{training.sample(draw_noise(4, random))};
      training.generator()->train();
      for (const auto& tensor : state_of(own)) results.push_back(tensor);
      return results;
    });
  };
  auto plain = run(0, 0);
  auto averaged = run(0.9, 2);
  CHECK(at::equal(averaged[0][0], averaged[1][0]));
  CHECK_FALSE(at::allclose(averaged[0][0], plain[0][0]));
  plain[0].erase(plain[0].begin());
  averaged[0].erase(averaged[0].begin());
  CHECK(all_equal(averaged[0], plain[0]));
}

}  // namespace gan
