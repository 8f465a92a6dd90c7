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

#include "support/archives.h"
#include "support/compare.h"
#include "support/temporary_folder.h"
#include "support/toy_device.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace ddp::offload_device_test {

namespace toy = testing::toy;

using Tensors = std::vector<at::Tensor>;

const c10::Device kToyGpu(at::kPrivateUse1, 0);

/// Two layers, made on their device: modules do not move to the toy.
struct Layers : torch::nn::Module {
  Layers(int64_t width, c10::Device device) {
    add("first", {2000, width}, device);
    add("first_bias", {2000}, device);
    add("second", {3, 2000}, device);
    add("second_bias", {3}, device);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto& p = tensors;
    return torch::linear(torch::linear(x, p[0], p[1]).tanh(), p[2], p[3]);
  }
  void add(const std::string& name, std::vector<int64_t> sizes, c10::Device device) {
    const auto numel = c10::multiply_integers(sizes);
    const auto angles = torch::arange(numel, torch::kDouble) * 1.1 + 1.0;
    const auto values = (angles.sin() * 0.1).to(torch::kFloat).view(sizes);
    tensors.push_back(register_parameter(name, values.to(device)));
  }
  std::vector<at::Tensor> tensors;
};
using Model = DistributedDataParallel<std::shared_ptr<Layers>>;

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

  /// \param state  to begin with, where it is not empty; then the state at the end.
  /// \return  the parameters after three steps, on the host; with `state`, its tensors before them.
  Tensors run(std::string* state = nullptr) const {
    const auto net = std::make_shared<Layers>(width, device);
    Model model(
        net, DistributedDataParallelOptions()
                 .process_group(toy::echo_group())
                 .bucket_cap_mb(0.02)
                 .check_inputs(false));
    auto optimizer = is_fused
                         ? make<optim::AdamW>(model, torch::optim::AdamWOptions(0.01))
                         : make<torch::optim::Adagrad>(model, torch::optim::AdagradOptions(0.01));
    if (state != nullptr && !state->empty()) {
      auto archive = testing::archive_of(*state);
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
    Tensors values;
    if (state != nullptr) {
      *state = testing::bytes_of_archive(*optimizer);
      const auto whole = optimizer->consolidated();
      for (const auto& p : net->parameters()) {
        const auto& own = static_cast<const torch::optim::AdamWParamState&>(
            *whole->state().at(p.unsafeGetTensorImpl()));
        values.push_back(own.exp_avg().clone());
        values.push_back(own.exp_avg_sq().clone());
      }
    }
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
  CHECK(testing::all_equal(training.run(&state), without.on_cpu(&state_of_cpu)));
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
  CHECK(pinned >= 3);  // the first piece of each step: the others follow it in memory
}

TEST_CASE("offload warns of nothing on a device", "[zero][offload][streams]") {
  const testing::WarnAlways always;
  testing::Warnings warnings;
  DeviceRun().run();
  CHECK(warnings.count("ZeroRedundancyOptimizer") == 0);
}

}  // namespace ddp
