#include "options.h"

#include <CLI/CLI.hpp>

#include "../common/command_line.h"

namespace mnist {
using examples::between;
using examples::kPositiveFinite;

std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help) {
  Options options;
  CLI::App app(
      "Trains a small convolutional network on handwritten digits, on one process or, started "
      "with ddprun, on several.",
      "mnist");
  app.option_defaults()->always_capture_default();
  app.add_option("--epochs", options.epochs, "Passes over the training images")
      ->check(between<int64_t>(1, 1000000));
  app.add_option("--batch-size", options.batch_size, "Images per rank and step")
      ->check(between<size_t>(1, 1000000));
  app.add_option("--lr", options.lr, "Learning rate of the first step; it falls linearly to 0")
      ->check(kPositiveFinite);
  app.add_option("--seed", options.seed, "Seed of the weights, the order and the dropout")
      ->check(between<int64_t>(0, INT64_MAX));
  app.add_option(
      "--backend", options.backend,
      "gloo, shm (ranks of one host) or nccl (each rank on its own GPU); empty: the best there is");
  auto* cap = app.add_option(
                     "--bucket-cap-mb", options.bucket_cap_mb,
                     "Size of a gradient bucket in MiB; unset: the library's choice")
                  ->check(kPositiveFinite);
  app.add_flag(
         "--tune-bucket-cap", options.tune_bucket_cap,
         "Choose that size by what the first steps take")
      ->excludes(cap);
  app.add_option("--threads", options.threads, "Threads per rank; 0: as OMP_NUM_THREADS says")
      ->check(between(0, 1024));
  app.add_option("--data", options.data, "Folder with MNIST's four files, unpacked");
  app.add_option("--save", options.save, "File for the trained parameters");
  auto* checkpoint = app.add_option(
      "--checkpoint", options.checkpoint, "Folder for checkpoints of the whole run; empty: none");
  app.add_option("--checkpoint-every", options.checkpoint_every, "Steps from one to the next")
      ->needs(checkpoint)
      ->check(between<int64_t>(1, 1000000));
  app.add_flag(
         "--leave-on-signal", options.leave_on_signal,
         "At SIGTERM, SIGUSR1 or SIGUSR2 to a rank, save and leave with exit code 143")
      ->needs(checkpoint);
  app.add_flag("--resume", options.resume, "Go on from the last checkpoint there, if there is one")
      ->needs(checkpoint);
  app.add_option(
      "--trace", options.trace,
      "File for the times inside some steps of all ranks, for ui.perfetto.dev");

  if (!examples::parse_command_line(app, argc, argv, help)) return std::nullopt;
  return options;
}

}  // namespace mnist
