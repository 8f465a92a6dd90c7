// Measures the cost of beginning an epoch, in time and in memory: DistributedSampler::reset beside
// the randperm that it needs in any case.
#include <malloc.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <ddp/sampler.h>

#include "in_turns.h"
#include "micro.h"

namespace {

double mebibytes(double bytes) { return bytes / (1 << 20); }

/// A field of /proc/self/status in MiB: VmRSS is the current resident memory, VmHWM its peak.
double memory(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == field + ":") {
      double kibibytes = 0;
      status >> kibibytes;
      return kibibytes / 1024;
    }
  }
  return 0;
}

// Resets VmHWM to VmRSS.
void forget_peak() {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5;
}

struct EpochRow {
  double randperm_ms = 0;
  double reset_ms = 0;
  double ratio = 0;
  double peak_mib = 0;  // while it draws
  double held_mib = 0;  // afterwards
};

EpochRow measure_epoch(int64_t size, int64_t replicas, int rounds) {
  ddp::DistributedSampler sampler(
      static_cast<size_t>(size),
      ddp::DistributedSamplerOptions().num_replicas(replicas).rank(replicas - 1));
  std::vector<double> permutations, resets, ratios;
  EpochRow row;
  forget_peak();
  const double before = memory("VmRSS");
  for (int round = 0; round < rounds; ++round) {
    permutations.push_back(benchmarks::milliseconds([&] {
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(round);
      at::randperm(size, generator, at::TensorOptions().dtype(at::kLong));
    }));
    forget_peak();
    sampler.set_epoch(static_cast<size_t>(round));
    resets.push_back(benchmarks::milliseconds([&] { sampler.reset(); }));
    ratios.push_back(resets.back() / permutations.back());
    row.peak_mib = memory("VmHWM") - before;
    forget_peak();
    row.held_mib = memory("VmRSS") - before;
    sampler.next(1);
  }
  row.randperm_ms = benchmarks::median(permutations);
  row.reset_ms = benchmarks::median(resets);
  row.ratio = benchmarks::median(ratios);
  return row;
}

void measure_sampler(const std::vector<int64_t>& sizes, int64_t replicas, int rounds) {
  std::printf(
      "%12s %12s %10s %8s %16s %10s %18s %10s\n", "samples", "randperm ms", "reset ms", "ratio",
      "permutation MiB", "share MiB", "peak MiB (RSS)", "held MiB");
  for (const int64_t size : sizes) {
    const auto row = measure_epoch(size, replicas, rounds);
    const double share = static_cast<double>((size + replicas - 1) / replicas);
    std::printf(
        "%12ld %12.3f %10.3f %8.2f %16.1f %10.1f %18.1f %10.1f\n", size, row.randperm_ms,
        row.reset_ms, row.ratio, mebibytes(8.0 * static_cast<double>(size)), mebibytes(8 * share),
        row.peak_mib, row.held_mib);
  }
}

}  // namespace

void benchmarks::add_sampler(CLI::App& app) {
  auto* command = app.add_subcommand(
      "sampler", "Time and memory that the beginning of an epoch takes, on one of several ranks.");
  static std::vector<int64_t> sizes = {0, 1, 1000, 1000000, 100000000};
  static int64_t replicas = 8;
  static int rounds = 5;
  command->add_option("--sizes", sizes, "Samples in the dataset")
      ->check(CLI::Range(0L, 4000000000L));
  command->add_option("--replicas", replicas, "Ranks that share it")
      ->check(CLI::Range(1L, 1000000L));
  command->add_option("--rounds", rounds, "Epochs of each size")->check(CLI::Range(1, 1000));
  command->callback([] { measure_sampler(sizes, replicas, rounds); });
}
