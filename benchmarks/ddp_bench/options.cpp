#include "options.h"

#include <algorithm>
#include <cmath>
#include <set>

#include <c10/util/StringUtil.h>
#include <CLI/CLI.hpp>

#include "examples/common/command_line.h"

#include "benchmarks/ddp_bench/engines/modes.h"
#include "benchmarks/ddp_bench/models/models.h"

namespace ddp_bench {
namespace {

constexpr const char* kDescription =
    "Times training steps of one model in several ways of averaging gradients, which take turns, "
    "and checks that all of them end with the same parameters.";

std::string details() {
  std::string text = "Modes:\n";
  for (const auto& mode : modes()) {
    text += "  " + mode.name + std::string(12 - mode.name.size(), ' ') + mode.help + "\n";
  }
  return text +
         "\nRank 0 prints one line of JSON for each mode; benchmarks/README.md explains its "
         "fields. "
         "A step\nis zero_grad, forward, loss, backward, averaging and SGD.\n"
         "\nExit code: 0; 1 when modes or ranks ended with different parameters, or something "
         "failed;\n2 bad usage.\n"
         "\nExample:\n"
         "  ddprun -n 2 ddp_bench --model mlp --modes none,c10d,ddp --iters 20 --rounds 5\n";
}

// CLI11's own check for positive numbers accepts nan and inf.
const CLI::Validator kMebibytes(
    [](const std::string& text) {
      double value = 0;
      const bool good = CLI::detail::lexical_cast(text, value) && std::isfinite(value) && value > 0;
      return good ? std::string() : "expected MiB greater than 0, got '" + text + "'";
    },
    /*validator_desc=*/"");

template <typename T>
CLI::Validator within(T low, T high) {
  return CLI::Range(low, high).description("");
}

CLI::Validator one_of(std::vector<std::string> names) {
  const auto check = [names = std::move(names)](const std::string& text) {
    if (std::find(names.begin(), names.end(), text) != names.end()) return std::string();
    return "expected one of " + CLI::detail::join(names, ", ") + ", got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

std::vector<std::string> mode_names() {
  std::vector<std::string> names;
  for (const auto& mode : modes()) names.push_back(mode.name);
  return names;
}

void add_measurement(CLI::App& app, Options& options) {
  auto* model =
      app.add_option("--model", options.model, "mnist, mlp, small_params, resnet18 or transformer")
          ->check(one_of(model_names()));
  auto* modes = app.add_option("--modes", options.modes, "Ways to train, see below")
                    ->delimiter(',')
                    ->check(one_of(mode_names()));
  app.add_option("--iters", options.iters, "Steps of each mode in a round; with --pp 4 by default")
      ->check(within(1, 1000000));
  app.add_option("--rounds", options.rounds, "Turns of each mode, in opposite order every other")
      ->check(within(1, 1000000));
  app.add_option(
         "--warmup", options.warmup,
         "Steps before, past the rebuild of the buckets; with --pp 2 by default")
      ->check(within(1, 1000000));
  app.add_option("--threads", options.threads, "Threads per rank")->check(within(1, 1024));
  app.add_option("--seed", options.seed, "Of the parameters and the data")
      ->check(within<int64_t>(0, INT32_MAX));
  app.add_option(
      "--backend", options.backend,
      "gloo, nccl (trains on a GPU), ...; empty: the library's choice");
  auto* memory = app.add_flag(
      "--memory", options.memory, "Measure the peak memory of one mode instead of times");
  auto* timeline = app.add_option(
      "--timeline", options.timeline, "File for the times inside one step of mode ddp, as JSON");
  app.add_flag(
         "--fsdp", options.fsdp, "Time eight layers as replicas and fully sharded, and no modes")
      ->excludes(model)
      ->excludes(modes)
      ->excludes(memory)
      ->excludes(timeline);
  app.add_option(
         "--fsdp-memory", options.fsdp_memory,
         "Measure the peak memory of one way of --fsdp: fsdp, fsdp_kept, ddp, or fsdp_alone "
         "without prefetch")
      ->check(one_of({"fsdp", "fsdp_kept", "fsdp_alone", "ddp"}))
      ->excludes(model)
      ->excludes(modes)
      ->excludes(memory)
      ->excludes(timeline);
  app.add_flag(
         "--tp", options.tp, "Time two linear layers on one rank and cut over all, and no modes")
      ->excludes(model)
      ->excludes(modes)
      ->excludes(memory)
      ->excludes(timeline);
  auto* pipeline =
      app.add_flag(
             "--pp", options.pp,
             "Time layers on one rank and in a pipeline of all, and no modes; --timeline is the "
             "trace of layers that sleep")
          ->excludes(model)
          ->excludes(modes)
          ->excludes(memory);
  app.add_option("--schedule", options.schedule, "Of --pp: gpipe, 1f1b, eager or interleaved")
      ->check(one_of({"gpipe", "1f1b", "eager", "interleaved"}))
      ->needs(pipeline);
  app.add_flag("--sleep", options.sleep, "Of --pp: only stages that sleep")->needs(pipeline);
  app.add_option("--message-kib", options.message_kib, "Of --pp: messages of stages that sleep")
      ->check(within<int64_t>(1, 1000000))
      ->needs(pipeline);
  app.add_option("--microbatches", options.microbatches, "Of --pp")
      ->check(within<int64_t>(1, 1000000))
      ->needs(pipeline);
}

// The command-line names of the wrapper's options.
struct WrapperFlags {
  std::optional<double> cap;
  std::vector<double> caps;
  std::string reduction = "mean";
  bool no_broadcast_buffers = false;
  bool no_init_sync = false;
  bool unused = false;
  bool views = false;
  bool static_graph = false;
  int64_t stats_every = ddp::DistributedDataParallelOptions().stats_every();

  ddp::DistributedDataParallelOptions options() const {
    return ddp::DistributedDataParallelOptions()
        .bucket_cap_mb(cap)
        .bucket_cap_mb_list(caps)
        .reduction(reduction == "mean" ? ddp::Reduction::Mean : ddp::Reduction::SampleWeighted)
        .broadcast_buffers(!no_broadcast_buffers)
        .init_sync(!no_init_sync)
        .find_unused_parameters(unused)
        .gradient_as_bucket_view(views)
        .static_graph(static_graph)
        .stats_every(stats_every);
  }
};

void add_wrapper(CLI::App& app, Options& options, WrapperFlags& flags) {
  auto* sweep = app.add_option(
                       "--sweep", options.sweep,
                       "Run each mode that has buckets once with each of these bucket_cap_mb")
                    ->delimiter(',')
                    ->check(kMebibytes);
  auto* cap = app.add_option("--bucket-cap-mb", flags.cap, "MiB of a bucket, ddp modes and c10d")
                  ->check(kMebibytes)
                  ->excludes(sweep);
  app.add_option("--bucket-cap-mb-list", flags.caps, "MiB of the first, second, ... bucket")
      ->delimiter(',')
      ->check(kMebibytes)
      ->excludes(sweep)
      ->excludes(cap);
  app.add_option("--reduction", flags.reduction, "mean or sample_weighted, ddp modes")
      ->check(one_of({"mean", "sample_weighted"}));
  app.add_flag(
      "--no-broadcast-buffers", flags.no_broadcast_buffers, "Leave it out, ddp modes and c10d");
  app.add_flag("--no-init-sync", flags.no_init_sync, "Leave it out, ddp modes");
  app.add_flag("--find-unused-parameters", flags.unused, "In all ddp modes");
  app.add_flag("--gradient-as-bucket-view", flags.views, "In all ddp modes");
  app.add_flag("--static-graph", flags.static_graph, "In all ddp modes");
  app.add_option(
         "--stats-every", flags.stats_every, "Steps from sample to sample; 0: none, ddp modes")
      ->check(within<int64_t>(0, INT32_MAX));
}

/// A step of a pipeline takes as long as one of a model that fills several ranks.
void shorten_pipeline(const CLI::App& app, Options& options) {
  if (app.count("--warmup") == 0) options.warmup = 2;
  if (app.count("--iters") == 0) options.iters = 4;
}

void check_memory(const Options& options) {
  if (options.modes.size() != 1) {
    throw UsageError(
        "--memory: expected one mode, which gets the processes for itself, got --modes " +
        CLI::detail::join(options.modes, ","));
  }
  if (!options.sweep.empty() || !options.timeline.empty()) {
    throw UsageError("--memory: expected neither --sweep nor --timeline, which time steps.");
  }
}

void check_together(const Options& options) {
  if (options.fsdp || !options.fsdp_memory.empty() || options.tp || options.pp) return;  // no modes
  const auto& names = options.modes;
  const std::set<std::string> once(names.begin(), names.end());
  if (once.size() != names.size()) {
    throw UsageError("--modes: expected each mode once, got " + CLI::detail::join(names, ","));
  }
  for (const auto& name : names) {
    const int fewest = find_mode(name).fewest_warmup;
    if (options.warmup >= fewest) continue;
    throw UsageError(c10::str(
        "--warmup: expected at least ", fewest, " steps for mode ", name, ", got ",
        options.warmup));
  }
  if (options.memory) check_memory(options);
  const bool tunes = once.count("ddp_tuned") > 0;
  if (tunes && !options.wrapper.bucket_cap_mb_list().empty()) {
    throw UsageError(
        "--bucket-cap-mb-list: expected modes without ddp_tuned, which would not tune, got "
        "--modes " +
        CLI::detail::join(names, ","));
  }
  const auto has_buckets = [](const std::string& name) { return find_mode(name).has_buckets; };
  if (!options.sweep.empty() && std::none_of(names.begin(), names.end(), has_buckets)) {
    throw UsageError(
        "--sweep: expected a mode with buckets, got --modes " + CLI::detail::join(names, ","));
  }
}

}  // namespace

std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help) {
  Options options;
  WrapperFlags flags;
  CLI::App app(kDescription, "ddp_bench");
  app.footer(details());
  app.option_defaults()->always_capture_default();
  std::string dtype = "float32";
  add_measurement(app, options);
  app.add_option("--dtype", dtype, "Of parameters, data and gradients: float32 or bfloat16")
      ->check(one_of({"float32", "bfloat16"}));
  app.add_option("--batch", options.batch, "Times the samples of the model's own batch")
      ->check(within<int64_t>(1, 65536));
  add_wrapper(app, options, flags);
  if (!examples::parse_command_line(app, argc, argv, help)) return std::nullopt;
  if (options.pp) shorten_pipeline(app, options);
  options.wrapper = flags.options();
  options.dtype = dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
  check_together(options);
  return options;
}

}  // namespace ddp_bench
