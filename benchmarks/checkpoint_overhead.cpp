// What saving costs the training steps: without saves, in the step that saves, and in those behind
// which it is written. Run it alone or under ddprun.
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include "median.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Sizes {
  int width = 1024;
  int layers = 4;
  int batch = 64;
  int steps = 90;  // after each save
  int saves = 5;
  std::string folder;
};

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

torch::nn::Sequential make_net(const Sizes& sizes) {
  torch::nn::Sequential net;
  for (int i = 0; i < sizes.layers; ++i) {
    net->push_back(torch::nn::Linear(sizes.width, sizes.width));
    net->push_back(torch::nn::ReLU());
  }
  return net;
}

/// Milliseconds: steps that nothing is written behind, steps that something is, saves, and the
/// times until a checkpoint had its name.
struct Times {
  std::vector<double> plain, behind, save, write;
};

Times measure(const Sizes& sizes) {
  ddp::DistributedDataParallel model(make_net(sizes));
  torch::optim::Adam optimizer(model->parameters(), 1e-4);
  const auto x = torch::randn({sizes.batch, sizes.width});
  ddp::Checkpointer checkpointer(sizes.folder, ddp::CheckpointerOptions().keep_last(1));
  checkpointer.add("model", model).add("optimizer", optimizer);
  const auto step = [&] {
    const auto start = Clock::now();
    optimizer.zero_grad();
    model->forward(x).pow(2).mean().backward();
    optimizer.step();
    return milliseconds_since(start);
  };

  Times times;
  for (int i = 0; i < 20; ++i) step();
  for (int64_t save = 1; save <= sizes.saves; ++save) {
    const auto is_written = [&] {
      const auto steps = checkpointer.steps();
      return !steps.empty() && steps.back() == save;
    };
    const auto start = Clock::now();
    checkpointer.save(save);
    times.save.push_back(milliseconds_since(start));
    bool written = false;
    for (int i = 0; i < sizes.steps; ++i) {
      const auto took = step();
      (written ? times.plain : times.behind).push_back(took);
      if (!written && is_written()) {
        written = true;
        times.write.push_back(milliseconds_since(start));
      }
    }
    checkpointer.wait();
  }
  return times;
}

}  // namespace

int main(int argc, char** argv) {
  Sizes sizes;
  CLI::App app("What saving costs the training steps.", "checkpoint_overhead");
  app.add_option("folder", sizes.folder, "Folder for the checkpoints")->required();
  app.add_option("--width", sizes.width, "Of each layer");
  app.add_option("--layers", sizes.layers, "Linear layers");
  app.add_option("--batch", sizes.batch, "Samples a step and rank");
  app.add_option("--steps", sizes.steps, "Steps after each save");
  app.add_option("--saves", sizes.saves, "How often to save");
  CLI11_PARSE(app, argc, argv);

  ddp::init_process_group();
  const auto times = measure(sizes);
  if (ddp::is_main()) {
    const auto plain = benchmarks::median(times.plain.empty() ? times.behind : times.plain);
    const auto behind = benchmarks::median(times.behind);
    const double megabytes =
        3 * 4e-6 * sizes.layers * (static_cast<double>(sizes.width) * sizes.width + sizes.width);
    std::printf(
        "%.0f MB, %d ranks: step %.2f ms, while a checkpoint is written %.2f ms (%+.1f%%, %zu "
        "steps), save() %.1f ms, written after %.0f ms\n",
        megabytes, ddp::get_world_size(), plain, behind, 100 * (behind / plain - 1),
        times.behind.size(), benchmarks::median(times.save),
        times.write.empty() ? -1 : benchmarks::median(times.write));
  }
  ddp::destroy_process_group();
}
