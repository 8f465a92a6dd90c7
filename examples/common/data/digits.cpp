#include "digits.h"

#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <ddp/process_group.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>
#include <CLI/CLI.hpp>

#include "../command_line.h"
#include "../on_all_ranks.h"
#include "idx.h"

namespace examples {

DigitsOptions::DigitsOptions() : data(EXAMPLES_DEFAULT_DATA) {}

void add_digits_options(CLI::App& app, DigitsOptions& options) {
  app.option_defaults()->always_capture_default();
  app.add_option("--epochs", options.epochs, "Passes over the training images")
      ->check(between<int64_t>(1, 1000000));
  app.add_option("--batch-size", options.batch_size, "Images per rank and step")
      ->check(between<size_t>(1, 1000000));
  app.add_option("--hidden", options.hidden, "Width of the network's two hidden layers")
      ->check(between<int64_t>(1, 100000));
  app.add_option("--lr", options.lr, "Learning rate")->check(kPositiveFinite);
  app.add_option("--backend", options.backend, "gloo or shm; empty: the best there is");
  app.add_option("--data", options.data, "Folder with MNIST's four files, unpacked");
}

Digits Digits::at(const std::vector<size_t>& indices) const {
  const std::vector<int64_t> numbers(indices.begin(), indices.end());
  const auto index = at::tensor(numbers);
  return {pixels.index_select(0, index), labels.index_select(0, index)};
}

Digits read_digits(const DigitsOptions& options, const std::string& split) {
  LabeledImages read;
  const auto step = [&] { read = read_mnist(options.data, split); };
  ddp::is_initialized() ? on_all_ranks(step) : step();
  const auto pixels = read.images.to(at::kFloat).flatten(1);
  return {(pixels - pixels.mean()) / pixels.std(), read.labels};
}

torch::nn::Sequential make_classifier(const Digits& digits, const DigitsOptions& options) {
  torch::manual_seed(0);
  return torch::nn::Sequential(
      torch::nn::Linear(digits.pixels.size(1), options.hidden), torch::nn::ReLU(),
      torch::nn::Linear(options.hidden, options.hidden), torch::nn::ReLU(),
      torch::nn::Linear(options.hidden, 10));
}

double percent_right(torch::nn::Sequential& net, const Digits& digits) {
  const c10::NoGradGuard no_grad;
  const auto guesses = net->forward(digits.pixels).argmax(1);
  return 100 * guesses.eq(digits.labels).to(at::kDouble).mean().item<double>();
}

}  // namespace examples
