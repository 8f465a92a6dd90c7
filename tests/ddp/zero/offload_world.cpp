// offload_world MIB STEPS [PATH]: trains alone with a state of so many MiB, in a file where a path
// is given. Prints how fast the steps after the first read and wrote the state, and the parameters.
#include <ddp/ddp.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

namespace ddp_offload_world {
namespace {

constexpr int64_t kRows = 1024;  // in a row: 4 KiB, and 8 KiB of AdamW's state

/// Its gradients take no time, and no memory but their own.
struct Rows : torch::nn::Module {
  explicit Rows(int64_t rows) : values(register_parameter("values", torch::ones({rows, kRows}))) {}
  at::Tensor forward(double scale) { return values.sum() * scale; }
  at::Tensor values;
};

}  // namespace

int main(int argc, char** argv) try {
  torch::set_num_threads(1);
  const auto bytes = std::stoll(argv[1]) << 20;
  const int steps = std::stoi(argv[2]);
  ddp::init_process_group();
  {
    auto rows = std::make_shared<Rows>(bytes / (2 * 4 * kRows));
    ddp::DistributedDataParallel model(
        rows, ddp::DistributedDataParallelOptions().gradient_as_bucket_view(true));
    auto options = ddp::ZeroOptions();
    if (argc > 3) options.offload_file(argv[3]);
    ddp::ZeroRedundancyOptimizer<ddp::optim::AdamW> optimizer(
        model, torch::optim::AdamWOptions(0.1), options);
    std::chrono::duration<double> stepping{};
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      model->forward(1.0 + step).backward();
      const auto start = std::chrono::steady_clock::now();
      optimizer.step();
      if (step > 0) stepping += std::chrono::steady_clock::now() - start;
    }
    const auto state = static_cast<double>(optimizer.local_state_bytes());
    const auto rate = 2 * state * (steps - 1) / stepping.count();
    const torch::NoGradGuard no_grad;
    std::printf(
        "%.0f MiB of state, read and written at %.0f MB/s, values from %a to %a\n",
        state / (1 << 20), rate / 1e6, rows->values.min().item<float>(),
        rows->values.max().item<float>());
  }
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "offload_world: %s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace ddp_offload_world
