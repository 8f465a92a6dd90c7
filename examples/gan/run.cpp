#include "run.h"

#include <chrono>
#include <cstdio>
#include <string>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <ddp/metrics.h>
#include <ddp/process_group.h>
#include <torch/utils.h>

#include "../common/data/idx.h"
#include "../common/on_all_ranks.h"
#include "../common/output_file.h"
#include "../common/rank_device.h"
#include "../common/reporting.h"
#include "frechet_distance.h"
#include "picture.h"
#include "training.h"

namespace gan {
namespace {

constexpr int64_t kSamples = 1000;        // samples that are measured
constexpr int64_t kPictureSamples = 100;  // samples in the picture
constexpr int64_t kColumns = 10;

struct Data {
  examples::LabeledImages train;
  examples::LabeledImages test;
  Networks networks;
};

Networks make_networks(const Options& options, int64_t size) {
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  Networks networks{make_generator({size}), make_discriminator({size})};
  networks.generator->to(examples::rank_device(options.backend));
  networks.discriminator->to(examples::rank_device(options.backend));
  return networks;
}

Data prepare(const Options& options) {
  if (ddp::is_main() && !options.picture.empty()) {
    examples::check_can_write("--picture", options.picture);
  }
  Data data;
  data.train = examples::read_mnist(options.data, "train");
  data.test = examples::read_mnist(options.data, "t10k");
  data.networks = make_networks(options, network_size(data.train));
  return data;
}

std::string describe(const Options& options, const Data& data) {
  const auto& images = data.train.images;
  const int ranks = ddp::get_world_size();
  return c10::str(
      "training on ", images.size(0), " images of ", images.size(1), "x", images.size(2), "; ",
      ranks, ranks == 1 ? " rank" : " ranks", ", batch ", options.batch_size, " per rank");
}

void report_epoch(
    int64_t epoch, const Options& options, const Losses& own, double distance,
    std::chrono::steady_clock::time_point start, examples::Progress& progress) {
  const auto losses =
      ddp::average({{"discriminator", own.discriminator}, {"generator", own.generator}});
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  char line[160];
  std::snprintf(
      line, sizeof line,
      "epoch %lld/%lld: discriminator loss %.4f, generator loss %.4f, distance %.2f, %.1f s",
      static_cast<long long>(epoch + 1), static_cast<long long>(options.epochs),
      losses.at("discriminator"), losses.at("generator"), distance, seconds.count());
  progress.line(line);
}

}  // namespace

void run(const Options& options, examples::Progress& progress) {
  Data data;
  examples::on_all_ranks([&] { data = prepare(options); });
  progress.line(describe(options, data));
  const auto size = network_size(data.train);
  const auto test = to_input(data.test.images, size);
  auto random = make_random_generator(options.seed, /*stream=*/0);
  const auto noise = draw_noise(kSamples, random);  // the same after every epoch

  Training training(options, data.networks, data.train);
  double distance = 0;
  double least = 0;
  // Rank 0 alone: a forward pass of the unwrapped module needs no other rank.
  const auto measure = [&] {
    if (!ddp::is_main()) return;
    const auto samples = training.sample(noise);
    TORCH_CHECK(
        samples.isfinite().all().item<bool>(),
        "samples: expected finite pixels, got others. Choose a smaller --lr.");
    distance = frechet_distance(samples, test);
    if (options.picture.empty()) return;
    write_pgm(options.picture, picture_of(samples.narrow(0, 0, kPictureSamples), kColumns));
  };
  examples::on_all_ranks([&] {
    measure();
    if (ddp::is_main()) least = frechet_distance(to_input(data.train.images, size), test);
  });
  progress.line(c10::str(
      "distance to the test digits: ", distance, " untrained, ", least, " of the training digits"));

  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    const auto start = std::chrono::steady_clock::now();
    const auto label = c10::str("epoch ", epoch + 1, "/", options.epochs);
    const auto losses = training.epoch(
        epoch, [&](int64_t done, int64_t total) { progress.step(label, done, total); });
    examples::on_all_ranks(measure);
    report_epoch(epoch, options, losses, distance, start, progress);
  }

  training.check_replicas();
  examples::report_equal_replicas(progress);
  if (!options.picture.empty()) progress.line("picture: " + options.picture);
}

}  // namespace gan
