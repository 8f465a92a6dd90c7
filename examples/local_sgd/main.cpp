// Ranks step alone and average their parameters from time to time: `ddprun -n 2 local_sgd`.
#include <ddp/ddp.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include "../common/command_line.h"
#include "../common/data/digits.h"
#include "../common/program.h"

namespace {

struct Options : examples::DigitsOptions {
  int64_t warmup = 20;
  int64_t period = 8;
};

std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help) {
  Options options;
  options.epochs = 10;
  CLI::App app("Trains a network on handwritten digits by post-local SGD.", "local_sgd");
  examples::add_digits_options(app, options);
  app.add_option("--warmup", options.warmup, "Steps in which gradients are averaged, at first")
      ->check(examples::between<int64_t>(0, 1000000));
  app.add_option("--period", options.period, "Steps from one average of the parameters to the next")
      ->check(examples::between<int64_t>(1, 1000000));
  if (!examples::parse_command_line(app, argc, argv, help)) return std::nullopt;
  return options;
}

void run(const Options& options, examples::Progress& progress) {
  const auto train = read_digits(options, "train");
  const auto test = read_digits(options, "t10k");
  auto net = make_classifier(train, options);
  ddp::DistributedDataParallel model(net);
  const auto averager =
      std::make_shared<ddp::PeriodicModelAverager>(options.period, options.warmup);
  ddp::PostLocalSGDOptimizer optimizer(
      std::make_shared<torch::optim::SGD>(
          model->parameters(), torch::optim::SGDOptions(options.lr).momentum(0.5)),
      averager);
  const auto loss_of = [&](const examples::Digits& batch) {
    // After the warm-up no gradients are sent.
    if (averager->step() < options.warmup) {
      return torch::cross_entropy_loss(model->forward(batch.pixels), batch.labels);
    }
    const auto alone = model->no_sync();
    return torch::cross_entropy_loss(model->forward(batch.pixels), batch.labels);
  };
  ddp::DistributedSampler sampler(static_cast<size_t>(train.size()));

  int64_t steps = 0;
  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    sampler.set_epoch(static_cast<size_t>(epoch));
    sampler.reset();
    double loss_sum = 0;
    const auto first = steps;
    while (const auto indices = sampler.next(options.batch_size)) {
      const auto batch = train.at(*indices);
      optimizer.zero_grad();
      const auto loss = loss_of(batch);
      loss.backward();
      optimizer.step();
      loss_sum += loss.item<double>();
      ++steps;
    }
    progress.line(c10::str(
        "epoch ", epoch + 1, "/", options.epochs, ": loss ",
        ddp::average(loss_sum / static_cast<double>(steps - first)), ", test accuracy ",
        percent_right(net, test), "%"));
  }
  // Between two averages every rank has its own model, and the last step may not have averaged.
  ddp::PeriodicModelAverager(1).average_parameters(model->parameters());
  model->check_replicas();
  const auto alone = std::max<int64_t>(0, steps - options.warmup);
  const auto averages = (alone + options.period - 1) / options.period;
  progress.line(c10::str(
      steps, " steps, of which ", std::min(steps, options.warmup), " averaged gradients and ",
      averages, " parameters; in the end all do: test accuracy ", percent_right(net, test), "%"));
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_program("local_sgd", argc, argv, parse_options, run);
}
