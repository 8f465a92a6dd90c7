#include "plan/options.h"

#include <cmath>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

#include <CLI/CLI.hpp>

#include "plan/measured.h"

namespace ddp::plan {
namespace {

constexpr int kBadUsage = 2;

constexpr const char* kDescription =
    "Lists the ways to divide a transformer over ranks that fit their memory, the fastest first, "
    "by "
    "a model of what a step costs.";

constexpr const char* kDetails = R"(
A mesh is dp x tp x pp: replicas, ranks that share each layer, and stages of a pipeline; with fsdp,
replicas share parameters, gradients and AdamW's state. m: micro-batches. Everything is in float32.
docs/3d.md says how the rates are measured, and what the columns mean.

Example: 24 layers of 2048 features on 16 GPUs of two hosts
  ddp_plan --parameters 1.3e9 --layers 24 --hidden 2048 --heads 16 --sequence 2048 --batch 64 \
      --vocabulary 50257 --ranks 16 --hosts 2 --memory 40 --gflops 15000 --link 200 --network 25
)";

/// Rates and sizes in the units of the command line.
struct Units {
  double parameters = 0;
  double memory_gb = 0;
  double gflops = 0;
  std::string measured;  // a file; empty: none
  double link_gb = 10, link_us = 5;
  double network_gb = 1, network_us = 50;
};

CLI::Validator whole(int64_t low, int64_t high) { return CLI::Range(low, high).description(""); }

/// CLI11's own checks accept nan.
CLI::Validator number(double low, double high) {
  const auto check = [low, high](const std::string& text) {
    double value = 0;
    const bool good = CLI::detail::lexical_cast(text, value) && value >= low && value <= high;
    if (good) return std::string();
    std::ostringstream error;
    error << "expected a number from " << low << " to " << high << ", got " << text;
    return error.str();
  };
  return CLI::Validator(check, "");
}

constexpr int64_t kMany = int64_t{1} << 30;

void add_model(CLI::App& app, Options& options, Units& units) {
  auto& model = options.task.model;
  app.add_option("--parameters", units.parameters, "Of the whole model, such as 1.3e9")
      ->required()
      ->check(number(1, 1e15));
  app.add_option("--layers", model.layers, "Blocks of attention and a feed-forward network")
      ->required()
      ->check(whole(1, 100000));
  app.add_option("--hidden", model.hidden, "Features of a position")
      ->required()
      ->check(whole(1, 1 << 24));
  app.add_option("--heads", model.heads, "Of attention; tp divides them. Default: --hidden / 64")
      ->check(whole(1, 1 << 24));
  app.add_option("--sequence", model.sequence, "Positions of a sample")
      ->required()
      ->check(whole(1, kMany));
  app.add_option(
         "--vocabulary", model.vocabulary,
         "Rows of a table of tokens that is the head as well; 0: none")
      ->check(whole(0, kMany))
      ->capture_default_str();
  app.add_flag(
      "--checkpoint", model.checkpoint, "Compute layers again in backward, to keep less of them");
  app.add_option("--batch", options.task.batch, "Samples of a step, of all replicas")
      ->required()
      ->check(whole(1, kMany));
  app.add_option(
         "--microbatches", options.task.microbatches,
         "Of a replica's part of the batch; 0: for each mesh as many as are fastest")
      ->check(whole(0, kMany))
      ->capture_default_str();
  app.add_option(
         "--layer-us", model.layer_us,
         "Microseconds that a layer's forward and backward take beside their operations, whatever "
         "the size of the micro-batch")
      ->check(number(0, 1e9))
      ->capture_default_str();
  app.add_option(
         "--sum-us", model.sum_us,
         "Microseconds that a sum over tp takes beside its bytes: calls, and the wait for the "
         "slowest rank")
      ->check(number(0, 1e9))
      ->capture_default_str();
  app.add_option(
         "--update-ns", model.update_ns, "Nanoseconds of AdamW's step and of clipping, a parameter")
      ->check(number(0, 1e6))
      ->capture_default_str();
}

void add_cluster(CLI::App& app, Options& options, Units& units) {
  auto& cluster = options.task.cluster;
  app.add_option("--ranks", cluster.ranks, "On all hosts")->required()->check(whole(1, 4096));
  app.add_option("--hosts", cluster.hosts, "Each has as many of the ranks")
      ->check(whole(1, 4096))
      ->capture_default_str();
  app.add_option("--memory", units.memory_gb, "GB (10^9 bytes) of a rank")
      ->required()
      ->check(number(1e-6, 1e9));
  app.add_option(
         "--gflops", units.gflops,
         "10^9 operations a second that a rank reaches in training, alone on its core or GPU")
      ->check(number(1e-6, 1e12));
  app.add_option(
         "--measured", units.measured,
         "Take the rate, memory and bytes from a run of this job in one mesh, in the place of "
         "--gflops: a file of ddprun --pretend --json")
      ->check(CLI::ExistingFile)
      ->type_name("FILE");
  app.add_option(
         "--cores", cluster.cores,
         "Of a host, where its ranks share fewer than they are; 0: each has its own")
      ->check(number(0, 1e6))
      ->capture_default_str();
  app.add_option("--link", units.link_gb, "GB/s between two ranks of a host")
      ->check(number(1e-9, 1e9))
      ->capture_default_str();
  app.add_option("--link-us", units.link_us, "Microseconds of a short message there")
      ->check(number(0, 1e9))
      ->capture_default_str();
  app.add_option("--network", units.network_gb, "GB/s that a host sends to others")
      ->check(number(1e-9, 1e9))
      ->capture_default_str();
  app.add_option("--network-us", units.network_us, "Microseconds of a short message there")
      ->check(number(0, 1e9))
      ->capture_default_str();
  app.add_option(
         "--overlap", cluster.overlap,
         "The part of a collective over dp that computing beside it hides: 1 where a GPU or a "
         "network sends, 0 where the ranks' own cores do")
      ->check(number(0, 1))
      ->capture_default_str();
}

void apply(const Units& units, Task& task) {
  task.model.parameters = std::llround(units.parameters);
  task.cluster.memory = 1e9 * units.memory_gb;
  task.cluster.operations = 1e9 * units.gflops;
  task.cluster.host = {1e-6 * units.link_us, 1e9 * units.link_gb};
  task.cluster.network = {1e-6 * units.network_us, 1e9 * units.network_gb};
}

/// Takes the rates of a run, where there is one.
void apply_measured(const CLI::App& app, const std::string& file, Task& task) {
  if (app.count("--gflops") + app.count("--measured") != 1) {
    throw CLI::ValidationError(
        std::string("--gflops: expected it, or --measured in its place, got ") +
        (file.empty() ? "neither" : "both"));
  }
  if (file.empty()) return;
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  const auto job = parse_measured(file, text.str());
  try {
    fit(task, job);
  } catch (const std::runtime_error& error) {
    throw CLI::ValidationError("--measured: " + file + ": " + error.what());
  }
}

}  // namespace

ParsedOptions parse_options(
    int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  Options options;
  Units units;
  CLI::App app(kDescription, "ddp_plan");
  app.footer(kDetails);
  app.set_version_flag("--version", "ddp_plan " DDP_VERSION);
  add_model(app, options, units);
  add_cluster(app, options, units);
  app.add_option("--top", options.top, "Lines of the table")
      ->check(whole(1, kMany))
      ->capture_default_str();
  app.add_flag("--json", options.json, "Print JSON: all that fit, in bytes and seconds");
  try {
    app.parse(argc, argv);
    auto& model = options.task.model;
    if (app.count("--heads") == 0) model.heads = std::max<int64_t>(1, model.hidden / 64);
    apply(units, options.task);
    const auto error = error_of(options.task);
    if (!error.empty()) throw CLI::ValidationError(error);
    apply_measured(app, units.measured, options.task);
  } catch (const CLI::Success& request) {  // --help, --version
    return {std::nullopt, app.exit(request, out, err)};
  } catch (const std::runtime_error& error) {
    err << "ddp_plan: " << error.what() << " (ddp_plan --help lists the options)\n";
    return {std::nullopt, kBadUsage};
  }
  return {options, 0};
}

}  // namespace ddp::plan
