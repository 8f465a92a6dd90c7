// Measures the cost of saving for the training steps: without saves, in the step that saves, and
// while a checkpoint is written. Run it alone or under ddprun.
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "../median.h"
#include "micro.h"

namespace {

using CheckpointClock = std::chrono::steady_clock;

struct CheckpointSizes {
  int width = 1024;
  int layers = 4;
  int batch = 64;
  int steps = 90;  // after each save
  int saves = 5;
  std::string folder;
};

double milliseconds_since(CheckpointClock::time_point start) {
  return std::chrono::duration<double, std::milli>(CheckpointClock::now() - start).count();
}

torch::nn::Sequential make_checkpointed_net(const CheckpointSizes& sizes) {
  torch::nn::Sequential net;
  for (int i = 0; i < sizes.layers; ++i) {
    net->push_back(torch::nn::Linear(sizes.width, sizes.width));
    net->push_back(torch::nn::ReLU());
  }
  return net;
}

/// Times in milliseconds.
struct CheckpointTimes {
  std::vector<double> plain;    // steps while nothing is written
  std::vector<double> writing;  // steps while a checkpoint is written
  std::vector<double> save;     // calls of save()
  std::vector<double> named;    // from save() until the checkpoint had its final name
};

CheckpointTimes measure_checkpoint(const CheckpointSizes& sizes) {
  ddp::DistributedDataParallel model(make_checkpointed_net(sizes));
  torch::optim::Adam optimizer(model->parameters(), 1e-4);
  const auto x = torch::randn({sizes.batch, sizes.width});
  ddp::Checkpointer checkpointer(sizes.folder, ddp::CheckpointerOptions().keep_last(1));
  checkpointer.add("model", model).add("optimizer", optimizer);
  const auto step = [&] {
    const auto start = CheckpointClock::now();
    optimizer.zero_grad();
    model->forward(x).pow(2).mean().backward();
    optimizer.step();
    return milliseconds_since(start);
  };

  CheckpointTimes times;
  for (int i = 0; i < 20; ++i) step();
  for (int64_t save = 1; save <= sizes.saves; ++save) {
    const auto is_written = [&] {
      const auto steps = checkpointer.steps();
      return !steps.empty() && steps.back() == save;
    };
    const auto start = CheckpointClock::now();
    checkpointer.save(save);
    times.save.push_back(milliseconds_since(start));
    bool written = false;
    for (int i = 0; i < sizes.steps; ++i) {
      const auto took = step();
      (written ? times.plain : times.writing).push_back(took);
      if (!written && is_written()) {
        written = true;
        times.named.push_back(milliseconds_since(start));
      }
    }
    checkpointer.wait();
  }
  return times;
}

void print_checkpoint_times(const CheckpointSizes& sizes, const CheckpointTimes& times) {
  const auto plain = benchmarks::median(times.plain.empty() ? times.writing : times.plain);
  const auto writing = benchmarks::median(times.writing);
  const double megabytes =
      3 * 4e-6 * sizes.layers * (static_cast<double>(sizes.width) * sizes.width + sizes.width);
  std::printf(
      "%.0f MB, %d ranks: step %.2f ms, while a checkpoint is written %.2f ms (%+.1f%%, %zu "
      "steps), save() %.1f ms, written after %.0f ms\n",
      megabytes, ddp::get_world_size(), plain, writing, 100 * (writing / plain - 1),
      times.writing.size(), benchmarks::median(times.save),
      times.named.empty() ? -1 : benchmarks::median(times.named));
}

}  // namespace

void benchmarks::add_checkpoint(CLI::App& app) {
  auto* command = app.add_subcommand("checkpoint", "What saving costs the training steps.");
  static CheckpointSizes sizes;
  command->add_option("folder", sizes.folder, "Folder for the checkpoints")->required();
  command->add_option("--width", sizes.width, "Of each layer");
  command->add_option("--layers", sizes.layers, "Linear layers");
  command->add_option("--batch", sizes.batch, "Samples a step and rank");
  command->add_option("--steps", sizes.steps, "Steps after each save");
  command->add_option("--saves", sizes.saves, "How often to save");
  command->callback([] {
    ddp::init_process_group();
    const auto times = measure_checkpoint(sizes);
    if (ddp::is_main()) print_checkpoint_times(sizes, times);
    ddp::destroy_process_group();
  });
}
