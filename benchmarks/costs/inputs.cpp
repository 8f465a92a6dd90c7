// Measures what check_inputs costs a pass: the first three passes of a wrapper compare samples of
// their inputs. `ddprun -n 2 costs inputs --shape 32,3,224,224`.
#include <array>
#include <cstdio>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/process_group.h>

#include "benchmarks/costs/repetitions.h"
#include "benchmarks/median.h"

#include "costs.h"

namespace {

constexpr size_t kChecked = 3;
constexpr size_t kPasses = 8;
using PassTimes = std::array<double, kPasses>;

/// Reads little of its input, so that a pass is short.
struct ReadsOneRow : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return (x.select(0, 0).reshape(-1)[0] * weight).sum(); }
  at::Tensor weight{register_parameter("weight", at::ones({64}))};
};

PassTimes passes_of_new_wrapper(const std::vector<at::Tensor>& inputs, bool check) {
  const auto options = ddp::DistributedDataParallelOptions().check_inputs(check);
  ddp::DistributedDataParallel model(std::make_shared<ReadsOneRow>(), options);
  PassTimes times{};
  for (size_t pass = 0; pass < kPasses; ++pass) {
    ddp::barrier();
    times[pass] = costs::microseconds_of([&] { model->forward(inputs[pass]).backward(); });
  }
  return times;
}

void measure_inputs(const std::vector<int64_t>& shape, bool transposed, int rounds) {
  std::vector<at::Tensor> inputs;
  for (size_t pass = 0; pass < kPasses; ++pass) {
    const auto input = at::rand(shape);
    inputs.push_back(transposed ? input.transpose(0, -1) : input);
  }
  std::vector<double> plain, checked, after;  // differences are of passes of one round
  for (int round = 0; round < rounds; ++round) {
    const bool first = round % 2 == 0;
    const auto one = passes_of_new_wrapper(inputs, first);
    const auto other = passes_of_new_wrapper(inputs, !first);
    const auto& on = first ? one : other;
    const auto& off = first ? other : one;
    for (size_t pass = 0; pass < kPasses; ++pass) {
      if (pass > 0) plain.push_back(off[pass]);
      (pass < kChecked ? checked : after).push_back(on[pass] - off[pass]);
    }
  }
  if (ddp::get_rank() == 0) {
    std::printf(
        "{\"what\": \"check_inputs\", \"ranks\": %d, \"bytes\": %lld, \"pass_us\": %.1f, "
        "\"checked_adds_us\": %.1f, \"later_adds_us\": %.1f}\n",
        ddp::get_world_size(), static_cast<long long>(inputs[0].nbytes()),
        benchmarks::median(plain), benchmarks::median(checked), benchmarks::median(after));
  }
}

}  // namespace

void costs::add_inputs(CLI::App& app) {
  auto* command = app.add_subcommand("inputs", "What check_inputs adds to a pass.");
  static std::vector<int64_t> shape = {128, 784};
  static bool transposed = false;
  static int rounds = 300;
  command->add_option("--shape", shape, "of the input")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_flag("--transposed", transposed, "an input that is not contiguous");
  command->add_option("--rounds", rounds, "wrappers of each kind, in turns")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command->callback([] {
    ddp::init_process_group();
    measure_inputs(shape, transposed, rounds);
    ddp::destroy_process_group();
  });
}
