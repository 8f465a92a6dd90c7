#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>

#include "../common/command_line.h"

namespace transformer {
namespace {

using examples::between;
using examples::kPositiveFinite;

void add_shape(CLI::App& app, Shape& shape) {
  app.add_option("--context", shape.context, "Characters that the network sees")
      ->check(between<int64_t>(1, 100000));
  app.add_option("--width", shape.width, "Numbers that stand for a character")
      ->check(between<int64_t>(1, 100000));
  app.add_option("--heads", shape.heads, "Attention heads, which divide the width")
      ->check(between<int64_t>(1, 100000));
  app.add_option("--layers", shape.layers, "Blocks of attention and feed-forward layers")
      ->check(between<int64_t>(1, 1000));
  app.add_option("--dropout", shape.dropout, "How often training zeroes an activation")
      ->check(between(0.0, 0.99));
  app.add_flag(
      "--checkpoint-activations", shape.checkpoint_activations,
      "Compute blocks once more in the backward pass, to keep less of them");
}

void add_training(CLI::App& app, Options& options) {
  app.add_option("--steps", options.steps, "Steps of the optimizer")
      ->check(between<int64_t>(2, 1000000000));
  app.add_option(
         "--batch-size", options.batch_size,
         "Windows per rank and backward pass; with --tp, --cp or --pp, per ranks that share a "
         "model")
      ->check(between<size_t>(1, 1000000));
  app.add_option("--accumulate", options.accumulate, "Backward passes a step")
      ->check(between<int64_t>(1, 1000000));
  app.add_option("--lr", options.lr, "Highest learning rate, after the warm-up")
      ->check(kPositiveFinite);
  app.add_option(
         "--warmup", options.warmup,
         "Steps in which the rate rises, at most a tenth by default; a cosine follows")
      ->check(between<int64_t>(1, 1000000000));
  app.add_option("--clip", options.clip, "Largest norm of the gradients")->check(kPositiveFinite);
  app.add_flag("--amp", options.shape.amp, "Matrix products in bfloat16");
  app.add_option(
         "--zero", options.zero, "Divide among the ranks: 1 AdamW's state, 2 the gradients as well")
      ->check(between(0, 2));
  app.add_option("--seed", options.seed, "Seed of the weights, the order, dropout and sampling")
      ->check(between<int64_t>(0, INT64_MAX));
  app.add_option(
      "--backend", options.backend,
      "gloo, shm (ranks of one host) or nccl (each rank on its own GPU); empty: the best there is");
}

void add_groups(CLI::App& app, Options& options) {
  app.add_flag(
         "--fsdp", options.fsdp,
         "Cut parameters, gradients and AdamW's state over the ranks, a block at a time whole")
      ->excludes(app.get_option("--zero"));
  app.add_option(
         "--dp", options.dp, "Models, which see other windows; 0: as many as the ranks make")
      ->check(between<int64_t>(0, 100000));
  app.add_option("--tp", options.tp, "Ranks that share a model: each has a part of its layers")
      ->check(between<int64_t>(1, 100000));
  app.add_option(
         "--cp", options.cp,
         "Ranks that share windows: each has some of their positions, and drops no attention "
         "weights")
      ->check(between<int64_t>(1, 100000));
}

void add_pipeline(CLI::App& app, Options& options) {
  app.add_option("--pp", options.pp, "Ranks that have some of the layers each, as a pipeline")
      ->check(between<int64_t>(1, 1000));
  app.add_option(
         "--schedule", options.schedule,
         "In which order they compute: gpipe, 1f1b, eager (1f1b for slow links), or interleaved "
         "with "
         "two stages a rank")
      ->check(CLI::IsMember({"gpipe", "1f1b", "eager", "interleaved"}).description(""));
  app.add_option(
         "--microbatches", options.microbatches, "Parts of a batch, which follow each other there")
      ->check(between<int64_t>(1, 1000000));
}

void add_regions(CLI::App& app, Regions& regions) {
  auto* every =
      app.add_option(
             "--diloco", regions.sync_every,
             "Steps after which regions exchange what they have learned (DiLoCo); 0: ranks average "
             "gradients in every step")
          ->check(between<int64_t>(0, 1000000));
  const auto add = [&](const char* name, auto& value, const char* help) {
    return app.add_option(name, value, help)->needs(every);
  };
  add("--regions", regions.count,
      "Regions of consecutive ranks, which average within; 0: each rank is one")
      ->check(between<int64_t>(0, 100000));
  add("--coordinator", regions.coordinator,
      "Where ddprun --coordinate runs, as it prints it: this job is one region, and others may "
      "join "
      "and leave; give each another --seed")
      ->excludes(app.get_option("--regions"));
  add("--outer-lr", regions.outer_lr, "Rate of the steps by these exchanges")
      ->check(kPositiveFinite);
  add("--outer-momentum", regions.outer_momentum, "Their Nesterov momentum")
      ->check(between(0.0, 0.999));
  add("--fragments", regions.fragments, "Parts of the parameters that take turns")
      ->check(between<int64_t>(1, 1000));
  add("--overlap", regions.overlap, "Steps that go on while a part is on its way")
      ->check(between<int64_t>(0, 1000000));
  add("--wire", regions.wire, "What is sent: float32, bfloat16 or int8")
      ->check(CLI::IsMember({"float32", "bfloat16", "int8"}).description(""));
}

void add_files(CLI::App& app, Options& options) {
  app.add_option("--report-every", options.report_every, "Steps from one line to the next")
      ->check(between<int64_t>(1, 1000000000));
  auto* checkpoint = app.add_option(
      "--checkpoint", options.checkpoint, "Folder for checkpoints of the whole run; empty: none");
  app.add_option("--checkpoint-every", options.checkpoint_every, "Steps from one to the next")
      ->needs(checkpoint)
      ->check(between<int64_t>(1, 1000000000));
  app.add_flag(
         "--leave-on-signal", options.leave_on_signal,
         "At SIGTERM, SIGUSR1 or SIGUSR2 to a rank, save and leave with exit code 143")
      ->needs(checkpoint)
      ->excludes(app.get_option("--elastic"));  // whose ranks leave one by one
  app.add_flag("--resume", options.resume, "Go on from the last checkpoint there, if there is one")
      ->needs(checkpoint);
  app.add_option("--load", options.load, "File of weights to begin with, of --save or Python's");
  app.add_option("--save", options.save, "File for the trained weights, which Python reads");
}

void add_sampling(CLI::App& app, Options& options) {
  app.add_option("--sample", options.sample, "Characters to write at the end; 0: none")
      ->check(between<int64_t>(0, 1000000));
  app.add_option(
      "--prompt", options.prompt, "What they go on with; empty: the text's first character");
  app.add_option("--temperature", options.temperature, "Low: likely characters only; high: any")
      ->check(kPositiveFinite);
}

void expect(bool holds, const std::string& rule, const std::string& got) {
  if (holds) return;
  throw UsageError(rule + ", got " + got + " (transformer --help lists the options)");
}

void check_together(const Options& options) {
  using std::to_string;
  const auto& shape = options.shape;
  expect(
      shape.width % shape.heads == 0,
      "--heads: expected a divisor of --width " + to_string(shape.width), to_string(shape.heads));
  expect(
      options.warmup < options.steps,
      "--warmup: expected fewer than --steps " + to_string(options.steps),
      to_string(options.warmup));
}

void check_cut_layers(const Options& options) {
  if (options.tp == 1) return;
  expect(
      options.shape.heads % options.tp == 0,
      "--heads: expected a multiple of --tp " + std::to_string(options.tp),
      std::to_string(options.shape.heads));
}

void check_shards(const Options& options) {
  if (!options.fsdp) return;
  expect(
      options.backend.find("nccl") == std::string::npos,
      "--backend: expected one for CPUs with --fsdp", options.backend);
}

void check_cut_windows(const Options& options) {
  if (options.cp == 1) return;
  expect(
      options.shape.context % (2 * options.cp) == 0,
      "--context: expected a multiple of 2 * --cp = " + std::to_string(2 * options.cp),
      std::to_string(options.shape.context));
  expect(
      options.backend.find("nccl") == std::string::npos,
      "--backend: expected one for CPUs with --cp " + std::to_string(options.cp), options.backend);
}

void check_stages(const Options& options, const CLI::App& app) {
  using std::to_string;
  if (options.pp == 1) {
    for (const auto* option : {"--schedule", "--microbatches"}) {
      expect(
          app.count(option) == 0, std::string(option) + ": expected --pp of 2 or more beside it",
          "--pp 1");
    }
    return;
  }
  const auto beside = " with --pp " + to_string(options.pp);
  const auto stages = options.pp * options.stages_a_rank();
  expect(
      options.shape.layers >= stages,
      "--layers: expected at least the " + to_string(stages) + " stages of --schedule " +
          options.schedule + beside,
      to_string(options.shape.layers));
  expect(
      static_cast<int64_t>(options.batch_size) >= options.microbatches,
      "--batch-size: expected at least --microbatches " + to_string(options.microbatches) + beside,
      to_string(options.batch_size));
  expect(
      options.zero == 0, "--zero: expected 0" + beside + ", where --fsdp divides AdamW's state",
      to_string(options.zero));
}

/// --elastic and --diloco are for ranks that have whole models.
void check_whole_models(const Options& options, const CLI::App& app) {
  const std::string which = options.elastic              ? "--elastic"
                            : options.regions.are_used() ? "--diloco"
                                                         : "";
  if (which.empty()) return;
  const auto expect_none = [&](bool is_used, const char* other) {
    expect(!is_used, which + ": expected ranks with whole models on CPUs", other);
  };
  expect_none(options.zero > 0 && !options.elastic, "--zero");
  expect_none(options.fsdp, "--fsdp");
  expect_none(options.tp > 1, "--tp");
  expect_none(options.cp > 1, "--cp");
  expect_none(options.pp > 1, "--pp");
  expect_none(options.backend.find("nccl") != std::string::npos, "--backend nccl");
  if (options.elastic) {
    expect(!options.regions.are_used(), "--elastic: expected no --diloco beside it", "both");
    expect(options.dp == 0, "--dp: expected 0 with --elastic", std::to_string(options.dp));
  } else {
    expect(
        options.regions.overlap <= options.regions.sync_every / options.regions.fragments,
        "--overlap: expected at most --diloco / --fragments",
        std::to_string(options.regions.overlap));
    expect(
        app.count("--dp") == 0, "--dp: expected --regions with --diloco",
        std::to_string(options.dp));
  }
}

}  // namespace

std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help) {
  Options options;
  CLI::App app(
      "Trains a language model of characters on a text, on one process or, started with ddprun, on "
      "several.",
      "transformer");
  app.option_defaults()->always_capture_default();
  app.add_option(
      "--text", options.text, "File to learn from, in UTF-8; its last tenth is held out");
  add_shape(app, options.shape);
  add_training(app, options);
  add_groups(app, options);
  add_pipeline(app, options);
  add_regions(app, options.regions);
  app.add_flag(
      "--elastic", options.elastic,
      "Go on where ranks are lost, and let new ones in: started by ddprun --elastic. With "
      "--checkpoint, a run of which no rank is left goes on from the last one");
  add_files(app, options);
  add_sampling(app, options);

  if (!examples::parse_command_line(app, argc, argv, help)) return std::nullopt;
  if (app.count("--warmup") == 0) {
    options.warmup = std::clamp<int64_t>(options.steps / 10, 1, options.warmup);
  }
  check_together(options);
  check_cut_layers(options);
  check_shards(options);
  check_cut_windows(options);
  check_stages(options, app);
  check_whole_models(options, app);
  return options;
}

}  // namespace transformer
