// The effect of an AutocastGuard on the thread, and its errors; mixed_precision.py compares its
// arithmetic with Python's.
#include <stdexcept>

#include <ATen/autocast_mode.h>
#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/catch.h"
#include "support/error_of.h"
#include "support/ranks.h"

namespace {

using namespace ddp;
using ddp::testing::error_of;

at::ScalarType product_dtype() {
  return torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

}  // namespace

TEST_CASE("autocast guards nest, and restore the previous state", "[pure]") {
  CHECK(product_dtype() == at::kFloat);
  {
    const AutocastGuard outer(torch::kCPU);
    CHECK(product_dtype() == at::kBFloat16);
    {
      const AutocastGuard inner(torch::kCPU, at::kHalf);
      CHECK(product_dtype() == at::kHalf);
      const AutocastGuard off(torch::kCPU, AutocastOptions().enabled(false));
      CHECK(product_dtype() == at::kFloat);
    }
    CHECK(product_dtype() == at::kBFloat16);
  }
  CHECK(product_dtype() == at::kFloat);
  try {
    const AutocastGuard guard(torch::kCPU, AutocastOptions(at::kHalf).cache_enabled(false));
    CHECK_FALSE(at::autocast::is_autocast_cache_enabled());
    throw std::runtime_error("in the middle");
  } catch (const std::runtime_error&) {
  }
  CHECK(product_dtype() == at::kFloat);
  CHECK(at::autocast::is_autocast_cache_enabled());
  CHECK(at::autocast::get_autocast_dtype(at::kCPU) == at::kBFloat16);
}

TEST_CASE("each autocast region casts a parameter again", "[pure]") {
  const auto weight = torch::ones({2, 2}, torch::requires_grad());
  const auto sum = [&] {
    const AutocastGuard outer(torch::kCPU);
    const AutocastGuard inner(torch::kCPU);
    return torch::mm(torch::ones({2, 2}), weight).sum().item<float>();
  };
  CHECK(sum() == 8);
  {
    const torch::NoGradGuard no_grad;
    weight.mul_(3);
  }
  CHECK(sum() == 24);
}

TEST_CASE("autocast refuses dtypes and devices without autocast", "[pure][errors]") {
  CHECK(
      error_of<c10::ValueError>([] { const AutocastGuard guard(torch::kCPU, at::kDouble); }) ==
      "AutocastGuard: expected dtype BFloat16 or Half, got Double. For full precision leave the "
      "guard out, or give it enabled(false).");
  CHECK(error_of<c10::ValueError>([] {
          const AutocastGuard guard(torch::kMeta);
        }).find("expected a device with autocast, got META") != std::string::npos);
  CHECK(product_dtype() == at::kFloat);
}

TEST_CASE("the wrapper averages the gradients of an autocast region", "[ranks]") {
  const auto results = ddp::testing::run_ranks<at::Tensor>(2, [](const auto& self) {
    torch::nn::Linear net(4, 3);
    torch::nn::init::constant_(net->weight, 0.5);
    DistributedDataParallel model(net, DistributedDataParallelOptions().process_group(self.group));
    at::Tensor loss;
    {
      const AutocastGuard autocast(torch::kCPU);
      loss = model->forward(torch::full({2, 4}, self.rank + 1.0)).sum();
    }
    loss.backward();
    TORCH_CHECK(net->weight.grad().scalar_type() == at::kFloat);
    return net->weight.grad();
  });
  for (const auto& gradient : results) CHECK(torch::equal(gradient, torch::full({3, 4}, 3.0)));
}
