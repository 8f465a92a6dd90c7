// Averages gradients without the wrapper: `ddprun -n 2 manual_allreduce`.
#include <ddp/ddp.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include <chrono>

#include "../common/command_line.h"
#include "../common/data/digits.h"
#include "../common/program.h"

namespace {

struct Options : examples::DigitsOptions {
  int64_t steps = 100;
};

std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help) {
  Options options;
  CLI::App app(
      "Averages gradients by hand, parameter by parameter and in one piece, and with the wrapper.",
      "manual_allreduce");
  examples::add_digits_options(app, options);
  app.remove_option(app.get_option("--epochs"));
  app.add_option("--steps", options.steps, "Steps of each")
      ->check(examples::between<int64_t>(1, 1000000));
  if (!examples::parse_command_line(app, argc, argv, help)) return std::nullopt;
  return options;
}

// Starts an all-reduce for each parameter, one after the other, after the backward pass. To do
// better by hand: start them as gradients become ready, in the same order on every rank, also where
// a rank's graph leaves a parameter out; and combine small ones.
void average_each(const std::vector<at::Tensor>& parameters) {
  for (const auto& p : parameters) {
    auto& gradient = p.mutable_grad();
    ddp::all_reduce(gradient);
    gradient.div_(ddp::get_world_size());
  }
}

// Averages all gradients in one all-reduce, for two copies of every gradient.
void average_at_once(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> pieces;
  for (const auto& p : parameters) pieces.push_back(p.grad().flatten());
  auto all = torch::cat(pieces);
  ddp::all_reduce(all);
  all.div_(ddp::get_world_size());
  int64_t at = 0;
  for (const auto& p : parameters) {
    p.mutable_grad().copy_(all.narrow(0, at, p.numel()).view_as(p));
    at += p.numel();
  }
}

/// Trains a network and returns it.
///
/// \param forward  computes the network's output, \param average  called after the backward pass.
template <typename Forward, typename Average>
void train(
    const Options& options, const examples::Digits& digits, torch::nn::Sequential& net,
    Forward forward, Average average) {
  torch::optim::SGD optimizer(net->parameters(), options.lr);
  ddp::DistributedSampler sampler(static_cast<size_t>(digits.size()));
  for (int64_t step = 0; step < options.steps; ++step) {
    auto indices = sampler.next(options.batch_size);
    if (!indices) {
      sampler.set_epoch(sampler.epoch() + 1);
      sampler.reset();
      indices = sampler.next(options.batch_size);
    }
    const auto batch = digits.at(*indices);
    optimizer.zero_grad();
    torch::cross_entropy_loss(forward(batch.pixels), batch.labels).backward();
    average(net->parameters());
    optimizer.step();
  }
}

void run(const Options& options, examples::Progress& progress) {
  const auto digits = read_digits(options, "train");
  const auto test = read_digits(options, "t10k");
  std::vector<at::Tensor> expected;  // of the first way
  const auto report = [&](const char* way, torch::nn::Sequential& net, const auto& start) {
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    double difference = 0;
    const auto parameters = net->parameters();
    if (expected.empty()) expected = parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto apart = (parameters[i] - expected[i]).abs().max().item<double>();
      difference = std::max(difference, apart);
    }
    TORCH_CHECK(difference < 1e-5, way, ": parameters differ by ", difference);
    progress.line(c10::str(
        way, ": ", took.count() / static_cast<double>(options.steps), " ms a step, test accuracy ",
        percent_right(net, test), "%, at most ", difference, " from the first"));
  };
  const auto nothing = [](const auto&) {};

  auto each = make_classifier(digits, options);
  auto start = std::chrono::steady_clock::now();
  train(
      options, digits, each, [&](const auto& x) { return each->forward(x); }, average_each);
  report("by hand, each parameter", each, start);

  auto at_once = make_classifier(digits, options);
  start = std::chrono::steady_clock::now();
  train(
      options, digits, at_once, [&](const auto& x) { return at_once->forward(x); },
      average_at_once);
  report("by hand, all at once", at_once, start);

  auto wrapped = make_classifier(digits, options);
  start = std::chrono::steady_clock::now();
  ddp::DistributedDataParallel model(wrapped);
  train(
      options, digits, wrapped, [&](const auto& x) { return model->forward(x); }, nothing);
  report("wrapped", wrapped, start);
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_program("manual_allreduce", argc, argv, parse_options, run);
}
