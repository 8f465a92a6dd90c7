#include "options.h"

#include <CLI/CLI.hpp>

#include "../common/command_line.h"

namespace gan {

using examples::between;
using examples::kPositiveFinite;

std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help) {
  Options options;
  CLI::App app(
      "Trains a generative adversarial network on handwritten digits, on one process or, started "
      "with ddprun, on several.",
      "gan");
  app.option_defaults()->always_capture_default();
  app.add_option("--epochs", options.epochs, "Passes over the training images")
      ->check(between<int64_t>(1, 1000000));
  app.add_option("--batch-size", options.batch_size, "Images per rank and step")
      ->check(between<size_t>(1, 1000000));
  app.add_option("--lr", options.lr, "Learning rate of both networks")->check(kPositiveFinite);
  app.add_option(
         "--ema", options.ema,
         "Decay of an average of the generator, which makes the samples; 0: none. Try 0.99")
      ->check(between(0.0, 1.0));
  app.add_option("--seed", options.seed, "Seed of the weights, the order and the noise")
      ->check(between<int64_t>(0, INT64_MAX));
  app.add_option(
      "--backend", options.backend,
      "gloo, shm (ranks of one host) or nccl (each rank on its own GPU); empty: the best there is");
  app.add_option("--data", options.data, "Folder with MNIST's four files, unpacked");
  app.add_option(
      "--picture", options.picture,
      "File (PGM) for a picture of samples, written after each epoch");

  if (!examples::parse_command_line(app, argc, argv, help)) return std::nullopt;
  return options;
}

}  // namespace gan
