// Measures what one rank does in a world of any size: `ddprun --pretend 1024 --rank 7 costs
// worlds`.
//
// Prints a line of JSON for each operation: the time of the processor, and the most memory that the
// process took for it beside what it had before. worlds.py makes the table of benchmarks/WORLDS.md
// of it.
#include <malloc.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/device_mesh.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/fully_sharded.h>
#include <ddp/optim.h>
#include <ddp/parallel_linear.h>
#include <ddp/process_group.h>
#include <ddp/sampler.h>
#include <ddp/zero.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "costs.h"
#include "repetitions.h"
#include "tests/support/temporary_folder.h"
#include "worlds.h"

namespace costs {
namespace {

constexpr double kSecondsOfRow = 0.2;
constexpr int64_t kUnits = 8;
constexpr int64_t kWidth = 64;
constexpr size_t kSamples = 1'000'000;
constexpr int kMostThreads = 1024;

/// A field of /proc/self/status in bytes.
int64_t memory(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != field + ":") continue;
    int64_t kibibytes = 0;
    status >> kibibytes;
    return 1024 * kibibytes;
  }
  return 0;
}

/// The most that the process took while `run` ran, beside what it had before.
int64_t peak_of(const WorldRow& row) {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5;
  const auto before = memory("VmRSS");
  row.run();
  return std::max<int64_t>(0, memory("VmHWM") - before);
}

/// This thread's processor time, so that other jobs of the machine do not count.
double processor_microseconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e6 * static_cast<double>(time.tv_sec) + 1e-3 * static_cast<double>(time.tv_nsec);
}

void measure(const WorldRow& row, int ranks) {
  row.run();  // with all that a process does once
  const auto bytes = peak_of(row);
  // Pages that malloc gives back and takes again would be most of the time.
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_MMAP_THRESHOLD, 1 << 25);
  row.run();
  std::shared_ptr<void> made;
  Times times;
  double total = 0;
  while (times.sorted.size() < 3 || (total < kSecondsOfRow * 1e6 && times.sorted.size() < 200)) {
    made.reset();
    const auto begin = processor_microseconds();
    made = row.run();
    times.sorted.push_back(processor_microseconds() - begin);
    total += times.sorted.back();
  }
  std::sort(times.sorted.begin(), times.sorted.end());
  print_line(row.what, ranks, bytes, times);
}

torch::nn::Sequential small_net() {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < kUnits; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
  return net;
}

std::shared_ptr<void> group_of_every(int stride, int ranks) {
  std::vector<int> members;
  for (int rank = ddp::get_rank() % stride; rank < ranks; rank += stride) members.push_back(rank);
  return std::make_shared<ddp::ProcessGroup>(ddp::new_group(members));
}

std::shared_ptr<void> mesh(std::vector<int64_t> shape, std::vector<std::string> names) {
  return std::make_shared<ddp::DeviceMesh>(
      ddp::init_device_mesh(std::move(shape), std::move(names)));
}

using Wrapped = ddp::DistributedDataParallel<torch::nn::Sequential>;

std::shared_ptr<void> step_of(Wrapped& model) {
  model->forward(torch::ones({1, kWidth})).sum().backward();
  return nullptr;
}

void run_rows(const std::vector<WorldRow>& rows, int ranks, const std::string& only) {
  for (const auto& row : rows) {
    if (row.what.find(only) != std::string::npos) measure(row, ranks);
  }
}

void measure_worlds(const std::string& only) {
  const WorldRow init = {"init_process_group", [] {
                           if (ddp::is_initialized()) ddp::destroy_process_group();
                           ddp::init_process_group();
                           return nullptr;
                         }};
  init.run();
  const int ranks = ddp::get_world_size();
  run_rows({init}, ranks, only);
  run_rows(rows_of_groups(ranks), ranks, only);
  const ddp::testing::TemporaryFolder folder;
  run_rows(rows_of_tables(ranks, folder.path()), ranks, only);
  const auto of_store = ranks <= kMostThreads ? rows_of_store(ranks) : std::vector<StoreRow>();
  for (const auto& row : of_store) {
    std::printf(
        "{\"what\": \"%s\", \"ranks\": %d, \"operations\": %lld, \"keys\": %lld}\n",
        row.what.c_str(), ranks, static_cast<long long>(row.operations),
        static_cast<long long>(row.keys_read));
  }
  ddp::destroy_process_group();
}

}  // namespace

std::vector<WorldRow> rows_of_groups(int ranks) {
  const auto wrapped = std::make_shared<Wrapped>(small_net());
  std::vector<WorldRow> rows;
  const auto add = [&](std::string what, std::function<std::shared_ptr<void>()> run) {
    rows.push_back({std::move(what), std::move(run)});
  };
  add("new_group of all ranks", [ranks] { return group_of_every(1, ranks); });
  add("new_group of every second rank", [ranks] { return group_of_every(2, ranks); });
  add("init_device_mesh of 2 axes", [ranks] { return mesh({ranks / 8, 8}, {"dp", "tp"}); });
  add("init_device_mesh of 3 axes", [ranks] {
    return mesh({ranks / 16, 4, 4}, {"dp", "pp", "tp"});
  });
  add("all_gather_strings of 20 bytes", [] {
    ddp::all_gather_strings("twenty bytes of text");
    return nullptr;
  });
  add("DistributedDataParallel", [] { return std::make_shared<Wrapped>(small_net()); });
  add("a step of DistributedDataParallel", [wrapped] { return step_of(*wrapped); });
  add("FullyShardedDataParallel, 8 units", [] {
    auto net = std::make_shared<torch::nn::Sequential>(small_net());
    ddp::fully_shard_children(*net);
    return net;
  });
  add("ZeroRedundancyOptimizer", [] {
    Wrapped model(small_net());
    return std::make_shared<ddp::ZeroRedundancyOptimizer<torch::optim::AdamW>>(
        model, torch::optim::AdamWOptions(1e-3));
  });
  add("ColumnParallelLinear over all ranks", [ranks] {
    return std::make_shared<ddp::ColumnParallelLinear>(kWidth, std::max(4096, ranks));
  });
  add("DistributedSampler of 1,000,000, an epoch", [] {
    auto sampler = std::make_shared<ddp::DistributedSampler>(kSamples);
    sampler->set_epoch(1);
    sampler->reset();
    return sampler;
  });
  return rows;
}

}  // namespace costs

void costs::add_worlds(CLI::App& app) {
  auto* command = app.add_subcommand(
      "worlds", "What one rank of many does, by their number: under ddprun --pretend.");
  static std::string only;
  command->add_option("--only", only, "rows whose names have this text");
  command->callback([] { measure_worlds(only); });
}
