// save_on_host on a device that runs nothing before it is waited for: a missing wait, or memory
// that is freed too early, shows as NaN.
#include <ddp/save_on_host.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <vector>

#include <torch/torch.h>

#include "support/toy_device.h"
#include "training/saved_tensors/saved_tensor_hooks.h"

#include "support/catch.h"

namespace ddp::testing {
namespace {

const c10::Device kToy(at::kPrivateUse1, 0);
constexpr c10::StreamId kCompute = 0;

/// Each layer saves its results, and drops them.
at::Tensor loss_of(const at::Tensor& x, int layers) {
  auto y = x;
  for (int i = 0; i < layers; ++i) y = (y * 0.5).sin().exp();
  return y.sum();
}

struct Run {
  std::vector<toy::Copy> forward, backward;
  int host_waits = 0;
  std::optional<at::Tensor> gradient;
};

Run run(int layers, bool on_host) {
  auto& device = toy::Device::get();
  const auto start = torch::linspace(-1, 1, 12);
  auto x = start.to(kToy).requires_grad_();
  device.forget();
  Run run;
  at::Tensor loss;
  {
    std::optional<save_on_host> saved;
    if (on_host) saved.emplace();
    loss = loss_of(x, layers);
  }
  run.forward = device.copies;
  device.copies.clear();
  loss.backward();
  run.backward = device.copies;
  run.host_waits = device.host_waits;
  run.gradient = toy::on_host(x.grad());
  device.forget();
  return run;
}

}  // namespace

TEST_CASE("save_on_host copies beside the stream that computes", "[saved][device][once]") {
  const auto without = run(8, false);
  const auto with = run(8, true);
  CHECK(without.forward.empty());
  REQUIRE(with.forward.size() >= 8);
  for (const auto& copy : with.forward) {
    CHECK(copy.stream == toy::kPoolStream);
    CHECK(copy.pinned);
    CHECK(copy.non_blocking);
  }
  CHECK(with.backward.size() == with.forward.size());
  CHECK(with.host_waits == 0);
  CHECK_FALSE(with.gradient->isnan().any().item<bool>());
  CHECK(torch::equal(*with.gradient, *without.gradient));
}

TEST_CASE(
    "the device's memory has the last few tensors that save_on_host copies",
    "[saved][device][once]") {
  auto& device = toy::Device::get();
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 7; ++i) tensors.push_back(torch::full({3}, 1.F + i).to(kToy));
  device.forget();
  const auto users = [&] {
    std::vector<size_t> counts;
    for (const auto& t : tensors) counts.push_back(t.storage().use_count());
    return counts;
  };
  const size_t own = tensors[0].storage().use_count();
  std::vector<UnpackFunction> unpacks;
  {
    CopiesToHost copies;
    for (const auto& t : tensors) unpacks.push_back(copies.add(t));
    CHECK(users() == std::vector<size_t>{own, own, own, own + 1, own + 1, own + 1, own + 1});
    // The compute stream waited for the first three copies, and the copies for what it had to do.
    CHECK(std::count(device.waits.begin(), device.waits.end(), kCompute) == 3);
    CHECK(std::count(device.waits.begin(), device.waits.end(), toy::kPoolStream) == 7);
    CHECK(device.host_waits == 0);
  }
  CHECK(users() == std::vector<size_t>(7, own));
  CHECK(std::count(device.waits.begin(), device.waits.end(), kCompute) == 3);
  tensors.clear();
  for (int i = 0; i < 7; ++i) {
    const auto back = unpacks[static_cast<size_t>(i)]();
    CHECK(torch::equal(toy::on_host(back), torch::full({3}, 1.F + i)));
  }
  device.forget();
}

TEST_CASE("what was changed in place since it was saved is an error", "[saved][device][once]") {
  auto& device = toy::Device::get();
  auto x = torch::linspace(-1, 1, 12).to(kToy).requires_grad_();
  at::Tensor loss;
  {
    const save_on_host saved;
    auto y = x.exp();
    y.mul_(3);  // while the copy of exp()'s result waits on its stream
    loss = y.sum();
  }
  CHECK_THROWS_WITH(loss.backward(), ContainsText("modified by an inplace operation since"));
  device.forget();
}

}  // namespace ddp::testing
