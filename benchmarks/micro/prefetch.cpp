// Measures the gain from prefetching: training steps of a small network whose batches need a slow
// transform, without a prefetching loader and with one of 1 and of 2 workers, in turns.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/prefetch.h>
#include <torch/torch.h>

#include "in_turns.h"
#include "micro.h"

namespace {

using Batch = torch::data::Example<>;

struct PrefetchSizes {
  int batch = 32;
  int image = 224;  // pixels a side, as stored
  int crop = 64;    // pixels a side, as the network gets them
  int channels = 16;
  int steps = 30;
  int rounds = 9;
};

// Random bytes, in the form of decoded images; every batch is drawn from the same images.
struct Images : torch::data::datasets::BatchDataset<Images, Batch> {
  explicit Images(const PrefetchSizes& sizes)
      : count(static_cast<size_t>(sizes.batch) * sizes.steps),
        stored(torch::randint(0, 256, {256, 3, sizes.image, sizes.image}, torch::kByte)) {}
  Batch get_batch(c10::ArrayRef<size_t> indices) override {
    std::vector<int64_t> rows(indices.begin(), indices.end());
    for (auto& row : rows) row %= stored.size(0);
    const auto which = torch::tensor(rows);
    return {stored.index_select(0, which), which % 10};
  }
  std::optional<size_t> size() const override { return count; }

  size_t count;
  at::Tensor stored;
};

// A random crop of every image, flipped or not, scaled and normalized.
Batch augmented(const Batch& batch, int crop) {
  namespace F = torch::nn::functional;
  const int64_t full = batch.data.size(3);
  const auto resize = F::InterpolateFuncOptions()
                          .size(std::vector<int64_t>{crop, crop})
                          .mode(torch::kBilinear)
                          .align_corners(false)
                          .antialias(true);
  std::vector<at::Tensor> images;
  for (const auto& image : batch.data.unbind()) {
    const int64_t side = full / 2 + torch::randint(full / 2, {1}).item<int64_t>();
    const int64_t top = torch::randint(full - side + 1, {1}).item<int64_t>();
    const int64_t left = torch::randint(full - side + 1, {1}).item<int64_t>();
    auto cut = image.narrow(1, top, side).narrow(2, left, side).to(torch::kFloat);
    if (torch::randint(2, {1}).item<int64_t>()) cut = cut.flip(2);
    images.push_back(F::interpolate(cut.unsqueeze(0), resize).sub_(127.5).div_(64));
  }
  return {torch::cat(images), batch.target};
}

class CropTraining {
 public:
  explicit CropTraining(int channels)
      : net_(
            conv(3, channels), torch::nn::ReLU(), conv(channels, 2 * channels), torch::nn::ReLU(),
            torch::nn::AdaptiveAvgPool2d(1), torch::nn::Flatten(),
            torch::nn::Linear(2 * channels, 10)),
        optimizer_(net_->parameters(), 0.01) {}

  void step(const Batch& batch) {
    optimizer_.zero_grad();
    torch::nn::functional::cross_entropy(net_->forward(batch.data), batch.target).backward();
    optimizer_.step();
  }

 private:
  static torch::nn::Conv2d conv(int from, int to) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(from, to, 3).stride(2).padding(1));
  }

  torch::nn::Sequential net_;
  torch::optim::SGD optimizer_;
};

// Milliseconds a step, over whole passes with the start and the end of threads.
class Comparison {
 public:
  explicit Comparison(const PrefetchSizes& sizes)
      : sizes_(sizes), images_(sizes), training_(sizes.channels), prepared_(augmented_first()) {}

  double compute() {
    return a_step([&] {
      for (int i = 0; i < sizes_.steps; ++i) training_.step(prepared_);
    });
  }

  double transform() {
    auto loader = inner();
    return a_step([&] {
      for (const auto& batch : *loader) augmented(batch, sizes_.crop);
    });
  }

  double plain() {
    auto loader = inner();
    return a_step([&] {
      for (const auto& batch : *loader) training_.step(augmented(batch, sizes_.crop));
    });
  }

  double prefetch(int workers) {
    auto loader = ddp::make_prefetch_loader(
        inner(), [crop = sizes_.crop](const Batch& batch) { return augmented(batch, crop); },
        ddp::PrefetchOptions().workers(workers));
    return a_step([&] {
      for (const auto& batch : *loader) training_.step(batch);
    });
  }

 private:
  using Sampler = torch::data::samplers::RandomSampler;

  std::unique_ptr<torch::data::StatelessDataLoader<Images, Sampler>> inner() const {
    return torch::data::make_data_loader<Sampler>(
        images_, torch::data::DataLoaderOptions(sizes_.batch));
  }

  template <typename Pass>
  double a_step(const Pass& pass) const {
    return benchmarks::milliseconds(pass) / sizes_.steps;
  }

  Batch augmented_first() {
    auto loader = inner();
    return augmented(*loader->begin(), sizes_.crop);
  }

  PrefetchSizes sizes_;
  Images images_;
  CropTraining training_;
  Batch prepared_;
};

void measure_prefetch(const PrefetchSizes& sizes) {
  torch::manual_seed(0);
  Comparison comparison(sizes);
  std::vector<benchmarks::Way> ways{
      {"compute", [&] { return comparison.compute(); }},
      {"transform", [&] { return comparison.transform(); }},
      {"plain", [&] { return comparison.plain(); }},
      {"prefetch 1", [&] { return comparison.prefetch(1); }},
      {"prefetch 2", [&] { return comparison.prefetch(2); }},
  };
  benchmarks::run_in_turns(ways, /*warm_up=*/1, sizes.rounds);

  // Ratios within a round: the machine's speed drifts between rounds.
  const auto ratio = [&](const auto& of, const auto& to) {
    std::vector<double> ratios;
    for (int round = 0; round < sizes.rounds; ++round) ratios.push_back(of(round) / to(round));
    return benchmarks::median(std::move(ratios));
  };
  const auto time_of = [&](size_t way) { return [&, way](int r) { return ways[way].times[r]; }; };
  const auto limit = [&](int r) { return std::max(ways[0].times[r], ways[1].times[r]); };
  for (size_t i = 2; i < ways.size(); ++i) {
    std::printf(
        "{\"mode\": \"%s\", \"ms_per_step\": %.3f, \"compute_ms\": %.3f, \"transform_ms\": %.3f, "
        "\"over_limit\": %.3f, \"speedup\": %.3f, \"steps\": %d, \"rounds\": %d}\n",
        ways[i].name.c_str(), benchmarks::median(ways[i].times), benchmarks::median(ways[0].times),
        benchmarks::median(ways[1].times), ratio(time_of(i), limit), ratio(time_of(2), time_of(i)),
        sizes.steps, sizes.rounds);
  }
}

}  // namespace

void benchmarks::add_prefetch(CLI::App& app) {
  auto* command = app.add_subcommand(
      "prefetch",
      "Time of a training step with batches out of a slow transform (random crops, flips, "
      "bilinear\n"
      "resizing), without and with ddp::make_prefetch_loader. The loop and each worker compute on\n"
      "one thread. Prints a line of JSON for each way: the median over rounds of the milliseconds\n"
      "a step of a whole pass takes, threads' start and first wait included. `over_limit` is the\n"
      "median over rounds of that over max(compute, transform), which one worker can reach on a\n"
      "core of its own; `speedup` is that of plain over it.");
  static PrefetchSizes sizes;
  command->add_option("--batch", sizes.batch, "Images in a batch")->check(CLI::Range(1, 4096));
  command->add_option("--image", sizes.image, "Pixels a side of an image before the transform")
      ->check(CLI::Range(8, 2048));
  command->add_option("--crop", sizes.crop, "Pixels a side after it")->check(CLI::Range(4, 1024));
  command->add_option("--channels", sizes.channels, "Width of the network")
      ->check(CLI::Range(1, 1024));
  command->add_option("--steps", sizes.steps, "Steps of a pass")->check(CLI::Range(2, 100000));
  command->add_option("--rounds", sizes.rounds, "Passes of each way, which take turns")
      ->check(CLI::Range(1, 100000));
  command->callback([] { measure_prefetch(sizes); });
}
