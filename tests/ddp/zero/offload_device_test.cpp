// A sharded optimizer that steps on the host, on a device that runs nothing before it is waited
// for: a missing wait, or memory that is used too early, shows as NaN.
#include <ddp/gradients.h>
#include <ddp/optim.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/StreamGuard.h>

#include "support/compare.h"
#include "support/nets.h"
#include "support/temporary_folder.h"
#include "support/toy_device.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace ddp::offload_device_test {

namespace toy = testing::toy;

using Tensors = std::vector<at::Tensor>;
using Model = DistributedDataParallel<torch::nn::Sequential>;

const c10::Device kToyGpu(at::kPrivateUse1, 0);

/// A net that is trained over toy::echo_group().
struct DeviceRun {
  c10::Device device = kToyGpu;
  ZeroOptions options = ZeroOptions().offload(true);
  bool is_fused = true;
  int64_t width = 8;
  int64_t first_step = 0;

  template <typename Optim, typename Options>
  std::unique_ptr<ZeroRedundancyOptimizerBase> make(Model& model, const Options& values) const {
    return std::make_unique<ZeroRedundancyOptimizer<Optim>>(model, values, options);
  }

  /// \param loaded  a state to begin with, without sharding; null: none.
  /// \return  the parameters after three steps, on the host.
  Tensors run(std::string* state = nullptr) const {
    torch::nn::Sequential net(
        torch::nn::Linear(width, 2000), torch::nn::Tanh(), torch::nn::Linear(2000, 3));
    testing::set_waves(*net, {1, 1, 0, 0.1});
    net->to(device);
    Model model(
        net, DistributedDataParallelOptions().process_group(toy::echo_group()).bucket_cap_mb(0.02));
    auto optimizer = is_fused
                         ? make<optim::AdamW>(model, torch::optim::AdamWOptions(0.01))
                         : make<torch::optim::Adagrad>(model, torch::optim::AdagradOptions(0.01));
    if (state != nullptr && !state->empty()) {
      torch::serialize::InputArchive archive;
      archive.load_from(state->data(), state->size());
      optimizer->load(archive);
    }
    for (int64_t step = first_step; step < first_step + 3; ++step) {
      ddp::zero_grad(*optimizer);
      const auto x = (torch::arange(2.0 * width).view({2, width}) * (step + 1.0)).cos().to(device);
      {
        const auto guard = model->no_sync();
        model->forward(x).square().mean().backward();
      }
      model->forward(x + 1).square().mean().backward();
      if (!options.overlap()) clip_grad_norm_(*optimizer, 0.5);
      optimizer->step();
    }
    if (state != nullptr) {
      std::ostringstream bytes;
      torch::serialize::OutputArchive archive;
      optimizer->save(archive);
      archive.save_to(bytes);
      *state = bytes.str();
    }
    Tensors values;
    for (const auto& p : net->parameters()) values.push_back(toy::on_host(p.detach()));
    return values;
  }

  Tensors on_cpu(std::string* state = nullptr) const {
    auto same = *this;
    same.device = at::kCPU;
    same.options.offload(false);
    return same.run(state);
  }
};

}  // namespace ddp::offload_device_test

namespace ddp {

using namespace offload_device_test;

TEST_CASE("a step on the host gives a device the bits of a CPU", "[zero][offload][streams]") {
  DeviceRun training;
  training.options.stage(GENERATE(1, 2)).overlap(GENERATE(false, true));
  training.is_fused = GENERATE(true, false);
  training.width = GENERATE(8, 1300);  // the second has several windows
  const c10::StreamGuard stream(toy::stream(GENERATE(0, 7)));
  CAPTURE(training.options.stage(), training.options.overlap(), training.is_fused, training.width);
  const auto got = training.run();
  CHECK(testing::all_equal(got, training.on_cpu()));
}

TEST_CASE("a step on the host equals the device's own", "[zero][offload][streams]") {
  DeviceRun training;
  training.is_fused = false;  // LibTorch's optimizer, which the device runs
  training.options.stage(GENERATE(1, 2));
  const auto offloaded = training.run();
  training.options.offload(false);
  CHECK(testing::all_equal(offloaded, training.run()));
}

TEST_CASE("an offloaded state may be in a file, and is the CPU's", "[zero][offload][streams]") {
  const testing::TemporaryFolder folder;
  DeviceRun training;
  training.width = GENERATE(8, 1300);
  const bool has_file = GENERATE(false, true);
  if (has_file) training.options.offload_file(folder.file("state"));
  auto without = training;
  without.options = ZeroOptions();
  std::string state, state_of_cpu;
  training.run(&state);
  without.on_cpu(&state_of_cpu);
  CHECK(state == state_of_cpu);
  training.first_step = without.first_step = 3;
  CHECK(testing::all_equal(training.run(&state_of_cpu), without.on_cpu(&state)));
}

TEST_CASE(
    "copies of an offloaded step are pinned and wait for nothing", "[zero][offload][streams]") {
  DeviceRun training;
  training.width = 8;
  auto& device = toy::Device::get();
  device.forget();
  training.run();
  const auto pinned = std::count_if(device.copies.begin(), device.copies.end(), [](const auto& c) {
    return c.pinned && c.non_blocking;
  });
  CHECK(pinned >= 3);  // the first piece of each step: the others lie behind it
}

TEST_CASE("offload warns of nothing on a device", "[zero][offload][streams]") {
  const testing::WarnAlways always;
  testing::Warnings warnings;
  DeviceRun().run();
  CHECK(warnings.count("ZeroRedundancyOptimizer") == 0);
}

}  // namespace ddp
