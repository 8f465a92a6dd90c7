#include "options.h"

#include <CLI/CLI.hpp>

#include "../common/command_line.h"

namespace cifar10 {

using examples::between;
using examples::kPositiveFinite;

std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help) {
  Options options;
  CLI::App app(
      "Trains a residual network on CIFAR-10, on one process or, started with ddprun, on several.",
      "cifar10");
  app.option_defaults()->always_capture_default();
  app.add_option("--model", options.model, "small, or resnet18 (for GPUs)")
      ->check(CLI::IsMember({"small", "resnet18"}).description(""));
  app.add_option("--epochs", options.epochs, "Passes over the training images")
      ->check(between<int64_t>(1, 1000000));
  app.add_option("--batch-size", options.batch_size, "Images per rank and step")
      ->check(between<size_t>(1, 1000000));
  app.add_option(
         "--lr", options.lr,
         "Highest learning rate for steps of 128 images; it grows with the images of all ranks")
      ->check(kPositiveFinite);
  app.add_option(
         "--ema", options.ema,
         "Decay of an average of the weights, which is tested and saved; 0: none. Try 0.999")
      ->check(between(0.0, 1.0));
  app.add_option("--seed", options.seed, "Seed of the weights, the order and the crops")
      ->check(between<int64_t>(0, INT64_MAX));
  app.add_option("--workers", options.workers, "Threads per rank that prepare batches")
      ->check(between(1, 64));
  app.add_flag(
      "--sync-batch-norm", options.sync_batch_norm,
      "Normalize with the batches of all ranks, not each rank with its own");
  app.add_flag("--amp", options.amp, "Convolutions and matrix products in bfloat16");
  app.add_option(
      "--backend", options.backend,
      "gloo, shm (ranks of one host) or nccl (each rank on its own GPU); empty: the best there is");
  app.add_option(
         "--bucket-cap-mb", options.bucket_cap_mb,
         "Size of a gradient bucket in MiB; unset: the library's choice")
      ->check(kPositiveFinite);
  app.add_option("--data", options.data, "Folder with CIFAR-10's six binary files, unpacked");
  app.add_option("--save", options.save, "File for the trained weights, which Python reads");
  auto* checkpoint = app.add_option(
      "--checkpoint", options.checkpoint,
      "Folder for a checkpoint of the whole run after each epoch; empty: none");
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

}  // namespace cifar10
