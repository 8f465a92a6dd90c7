// Measures how fast a step reads and writes a state in a file, beside a program that reads and
// writes a file of the same size, and beside a state in memory.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <ddp/internal/system/fd.h>
#include <ddp/optim.h>
#include <ddp/process_group.h>
#include <ddp/zero.h>

#include "in_turns.h"
#include "linear_layers.h"
#include "micro.h"

namespace {

constexpr size_t kBlock = size_t{4} << 20;

/// Reads each block of a file and writes it back, without the kernel's cache, as fast as one thread
/// can.
benchmarks::Way make_plain_way(const std::string& path, size_t bytes) {
  auto name = path + ".XXXXXX";
  auto fd = std::make_shared<ddp::Fd>(::mkostemp(name.data(), O_CLOEXEC | O_DIRECT));
  TORCH_CHECK(static_cast<bool>(*fd), "cannot make a file at ", path);
  ::unlink(name.c_str());
  std::shared_ptr<void> block(std::aligned_alloc(4096, kBlock), &std::free);
  std::fill_n(static_cast<char*>(block.get()), kBlock, 1);
  const auto write_at = [fd, block](size_t offset) {
    TORCH_CHECK(
        ::pwrite(fd->get(), block.get(), kBlock, static_cast<off_t>(offset)) == kBlock,
        "cannot write");
  };
  for (size_t offset = 0; offset < bytes; offset += kBlock) write_at(offset);
  return {"reads and writes of a file", [fd, block, bytes, write_at] {
            return benchmarks::milliseconds([&] {
              for (size_t offset = 0; offset < bytes; offset += kBlock) {
                TORCH_CHECK(
                    ::pread(fd->get(), block.get(), kBlock, static_cast<off_t>(offset)) == kBlock,
                    "cannot read");
                write_at(offset);
              }
            });
          }};
}

benchmarks::Way make_step_way(
    const std::string& name, int64_t layers, int64_t width, const ddp::ZeroOptions& options) {
  ddp::DistributedDataParallel model(
      benchmarks::make_linear_layers(layers, width),
      ddp::DistributedDataParallelOptions().gradient_as_bucket_view(true));
  auto optimizer = std::make_shared<ddp::ZeroRedundancyOptimizer<ddp::optim::AdamW>>(
      model, torch::optim::AdamWOptions(1e-4), options);
  model->forward(torch::randn({1, width})).square().mean().backward();
  return {
      name, [model, optimizer] { return benchmarks::milliseconds([&] { optimizer->step(); }); }};
}

void measure_offload(int64_t layers, int64_t width, const std::string& path, int rounds) {
  const auto bytes = static_cast<size_t>(layers * (width + 1) * width) * 8 / kBlock * kBlock;
  std::vector<benchmarks::Way> ways{
      make_step_way("step, state in memory", layers, width, ddp::ZeroOptions()),
      make_step_way("step, state in a file", layers, width, ddp::ZeroOptions().offload_file(path)),
      make_plain_way(path, bytes)};
  benchmarks::run_in_turns(ways, /*warm_up=*/2, rounds);  // the first rounds make the states
  benchmarks::print_linear_layers(layers, width);
  benchmarks::print_ways("", "ms", ways);
}

}  // namespace

void benchmarks::add_offload(CLI::App& app) {
  auto* command = app.add_subcommand(
      "offload", "Steps of one rank with AdamW's state in a file, beside reads and writes.");
  static int64_t layers = 32;
  static int64_t width = 2000;
  static std::string path = "/tmp/ddp-offload";
  static int rounds = 5;
  benchmarks::add_options_of_linear_layers(*command, layers, width);
  command->add_option("--file", path, "On the disk to measure");
  command->add_option("--rounds", rounds, "Steps of each, in turns")->check(CLI::Range(1, 1000000));
  command->callback([] {
    ddp::init_process_group();
    measure_offload(layers, width, path, rounds);
    ddp::destroy_process_group();
  });
}
