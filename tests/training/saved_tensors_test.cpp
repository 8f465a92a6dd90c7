// What operations save for backward is kept in another way, and gradients are to the bit the same.
#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ddp/ddp.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/live_bytes.h"
#include "support/ranks.h"
#include "training/saved_tensors/saved_tensor_hooks.h"

#include "support/catch.h"

using Catch::Matchers::Contains;
using ddp::SavedTensorHooks;
using namespace ddp::testing;

namespace {

/// Counts what is packed, and how much of it exists.
struct Counts {
  std::atomic<int> packed{0}, unpacked{0}, alive{0};

  ddp::PackFunction copies() {
    return [this](const at::Tensor& tensor) -> ddp::UnpackFunction {
      ++packed;
      const std::shared_ptr<void> living(nullptr, [this](void*) { --alive; });
      ++alive;
      return [this, living, copied = ddp::CopiesToHost().add(tensor)] {
        ++unpacked;
        return copied();
      };
    };
  }
};

torch::nn::Sequential small_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(
      torch::nn::Linear(8, 16), torch::nn::BatchNorm1d(16), torch::nn::GELU(),
      torch::nn::Dropout(0.2), torch::nn::Linear(16, 8),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})), torch::nn::Softmax(1));
}

at::Tensor loss_of(torch::nn::Sequential& net, const at::Tensor& x) {
  torch::manual_seed(2);
  return net->forward(x).square().sum();
}

at::Tensor batch() { return torch::linspace(-1, 1, 5 * 8).view({5, 8}).requires_grad_(); }

std::vector<at::Tensor> gradients_of(const torch::nn::Module& net, const at::Tensor& x) {
  std::vector<at::Tensor> gradients{x.grad()};
  for (const auto& parameter : net.parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

std::vector<at::Tensor> expected_gradients(int passes = 1) {
  auto net = small_net();
  const auto x = batch();
  for (int i = 0; i < passes; ++i) loss_of(net, x).backward();
  return gradients_of(*net, x);
}

}  // namespace

TEST_CASE("gradients of packed tensors are the same", "[saved][once]") {
  Counts counts;
  auto net = small_net();
  const auto x = batch();
  at::Tensor loss;
  {
    const SavedTensorHooks hooks(counts.copies());
    loss = loss_of(net, x);
  }
  CHECK(counts.packed > 10);
  CHECK(counts.alive == counts.packed);
  CHECK(counts.unpacked == 0);
  const bool elsewhere = GENERATE(false, true);
  if (elsewhere) {
    std::thread([&] { loss.backward(); }).join();
  } else {
    loss.backward();
  }
  CHECK(all_equal(gradients_of(*net, x), expected_gradients()));
  CHECK(counts.unpacked >= counts.packed - 2);
  CHECK(counts.alive == 0);

  const int before = counts.packed;
  loss_of(net, x).backward();  // outside
  CHECK(counts.packed == before);
}

TEST_CASE("a graph without backward frees what was packed", "[saved][once]") {
  Counts counts;
  auto net = small_net();
  {
    const SavedTensorHooks hooks(counts.copies());
    auto loss = loss_of(net, batch());
    CHECK(counts.alive > 0);
    loss.reset();
    CHECK(counts.alive == 0);
  }
  CHECK(counts.unpacked == 0);
}

TEST_CASE("a retained graph is unpacked again", "[saved][once]") {
  Counts counts;
  auto net = small_net();
  const auto x = batch();
  at::Tensor loss;
  {
    const SavedTensorHooks hooks(counts.copies());
    loss = loss_of(net, x);
  }
  loss.backward({}, /*retain_graph=*/true);
  const int once = counts.unpacked;
  CHECK(counts.alive == counts.packed);
  loss.backward();
  CHECK(counts.unpacked == 2 * once);
  CHECK(counts.alive == 0);
  auto other = small_net();
  const auto y = batch();
  const auto other_loss = loss_of(other, y);
  other_loss.backward({}, true);
  other_loss.backward();
  CHECK(all_equal(gradients_of(*net, x), gradients_of(*other, y)));
}

TEST_CASE("the innermost hooks count, and other threads have none", "[saved][once]") {
  Counts outer, inner;
  const auto x = batch();
  const SavedTensorHooks outer_hooks(outer.copies());
  const auto y = x.exp();
  CHECK(outer.packed == 1);
  {
    const SavedTensorHooks inner_hooks(inner.copies());
    x.exp();
    CHECK(inner.packed == 1);
    std::thread([&] { x.exp(); }).join();
  }
  CHECK(outer.packed == 1);
  CHECK(inner.packed == 1);
  x.exp();
  CHECK(outer.packed == 2);
}

TEST_CASE("second derivatives of packed tensors", "[saved][once]") {
  const auto second = [](bool packed) {
    Counts counts;
    const auto x = batch();
    std::optional<SavedTensorHooks> hooks;
    if (packed) hooks.emplace(counts.copies());
    const auto y = (x.exp() * x.sin()).sum();
    const auto first = torch::autograd::grad({y}, {x}, {}, true, true)[0];
    if (packed) CHECK(counts.packed > 4);
    const auto result = torch::autograd::grad({first.square().sum()}, {x})[0];
    return std::vector<at::Tensor>{first, result};
  };
  CHECK(all_equal(second(true), second(false)));
}

TEST_CASE("packed tensors may be rounded", "[saved][once]") {
  const auto x = torch::full({4}, 1.001).requires_grad_();
  at::Tensor y;
  {
    const SavedTensorHooks hooks([](const at::Tensor& tensor) -> ddp::UnpackFunction {
      return [low = tensor.to(torch::kBFloat16), dtype = tensor.scalar_type()] {
        return low.to(dtype);
      };
    });
    y = x.square().sum();
  }
  y.backward();
  CHECK(torch::equal(x.grad(), torch::full({4}, 2.0)));
}

TEST_CASE("errors of hooks are errors of forward and backward", "[saved][errors][once]") {
  const auto x = batch();
  {
    const SavedTensorHooks hooks([](const at::Tensor&) -> ddp::UnpackFunction {
      throw std::runtime_error("the disk is full");
    });
    CHECK_THAT(error_of([&] { x.exp(); }), Contains("the disk is full"));
    CHECK(error_of([&] { x + 1; }).empty());
  }
  at::Tensor y;
  {
    const SavedTensorHooks hooks([](const at::Tensor&) -> ddp::UnpackFunction {
      return []() -> at::Tensor { throw std::runtime_error("the disk is gone"); };
    });
    y = x.exp().sum();
  }
  CHECK_THAT(error_of([&] { y.backward(); }), Contains("the disk is gone"));
  CHECK_FALSE(x.grad().defined());
  x.exp().sum().backward();
  CHECK(x.grad().defined());
}

TEST_CASE("save_on_host keeps tensors of the CPU, and counts them", "[saved][once]") {
  auto net = small_net();
  const auto x = batch();
  at::Tensor loss;
  int64_t peak = 0;
  {
    const ddp::save_on_host saved;
    peak = peak_bytes_of([&] { loss = loss_of(net, x); });
    CHECK(saved.stats().kept > 10);
    CHECK(saved.stats().copied == 0);
    CHECK(saved.stats().bytes == 0);
  }
  CHECK(peak == peak_bytes_of([&] { loss_of(net, x); }));
  net->zero_grad();
  loss.backward();
  CHECK(all_equal(gradients_of(*net, x), expected_gradients()));
}

TEST_CASE("save_on_host finds what was changed in place", "[saved][errors][once]") {
  const auto x = batch();
  at::Tensor result, loss;
  {
    const ddp::save_on_host saved;
    result = x.exp();
    loss = result.sum();
  }
  {
    const torch::NoGradGuard no_grad;
    result.mul_(2);
  }
  CHECK_THAT(
      error_of([&] { loss.backward(); }),
      Contains(
          "save_on_host: expected a tensor as it was when an operation saved it, got [5, 8]") &&
          Contains("modified by an inplace operation"));
}

TEST_CASE("kept results do not keep their graph", "[saved][once]") {
  const auto x = batch();
  const std::weak_ptr<void> node = [&] {
    const ddp::save_on_host saved;
    const auto y = x.exp();  // saves its own result
    CHECK(saved.stats().kept == 1);
    return std::weak_ptr<void>(y.grad_fn());
  }();
  CHECK(node.expired());
}

TEST_CASE("parameters are told from results", "[saved][once]") {
  std::vector<bool> leaves;
  const auto x = torch::ones({2, 8}), w = torch::ones({8, 8}).requires_grad_();
  const auto look = [&](const at::Tensor& tensor) {
    leaves.push_back(!ddp::can_be_replaced(tensor));
    return ddp::keep_as_it_is(tensor);
  };
  {
    const SavedTensorHooks hooks(look);
    const auto y = x.matmul(w);  // saves x, w only where the other needs a gradient
    CHECK(leaves == std::vector<bool>{false});
    leaves.clear();
    y.matmul(w);
  }
  CHECK(leaves.size() == 2);
  CHECK(std::count(leaves.begin(), leaves.end(), true) == 1);
}

TEST_CASE("a view of a parameter stays where it is", "[saved][once]") {
  torch::nn::Linear linear(8, 4);
  const auto x = torch::ones({2, 8}).requires_grad_();
  std::vector<bool> stay;
  {
    const SavedTensorHooks hooks([&](const at::Tensor& tensor) {
      if (tensor.is_alias_of(linear->weight)) stay.push_back(!ddp::can_be_replaced(tensor));
      return ddp::keep_as_it_is(tensor);
    });
    linear->forward(x);  // saves the weight transposed
  }
  CHECK(stay == std::vector<bool>{true});
  CHECK_FALSE(ddp::can_be_replaced(linear->weight.narrow(0, 1, 2)));
  CHECK(ddp::can_be_replaced(x.exp().t()));
}

TEST_CASE("host copies have the values and strides", "[saved][once]") {
  const auto x = torch::arange(24, torch::kFloat).view({4, 6});
  for (const auto& tensor :
       {x, x.t(), x.narrow(1, 1, 3), x[0].expand({3, 6}), x.to(torch::kBool),
        torch::empty({0, 3})}) {
    const auto unpack = ddp::CopiesToHost().add(tensor);
    const auto back = unpack();
    CHECK(torch::equal(back, tensor));
    CHECK_FALSE(back.is_alias_of(tensor));
    if (tensor.is_non_overlapping_and_dense()) CHECK(back.strides() == tensor.strides());
    CHECK_FALSE(unpack().is_alias_of(back));
  }
}

TEST_CASE("save_on_host around checkpoint() and the wrapper", "[saved][ranks]") {
  const auto gradients = [](const Rank& self, bool on_host) {
    torch::nn::Linear first(nullptr), second(nullptr);
    {
      const ddp::DeferredInit one_stream;  // ranks share the default generator
      first = torch::nn::Linear(8, 8);
      second = torch::nn::Linear(8, 8);
    }
    for (const auto& linear : {first, second}) {
      const torch::NoGradGuard no_grad;
      ddp::materialize(*linear.ptr());
      linear->weight.copy_(torch::linspace(-1, 1, 64).view({8, 8}));
      linear->bias.fill_(0.1);
    }
    struct Net : torch::nn::Module {
      Net(torch::nn::Linear one, torch::nn::Linear two)
          : in(register_module("in", std::move(one))),
            out(register_module("out", std::move(two))) {}
      at::Tensor forward(const at::Tensor& x) {
        return out(ddp::checkpoint(in, torch::tanh(x))).exp();
      }
      torch::nn::Linear in, out;
    };
    const auto net = std::make_shared<Net>(first, second);
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().process_group(self.group));
    for (int pass = 0; pass < 3; ++pass) {
      std::optional<ddp::save_on_host> saved;
      if (on_host) saved.emplace();
      const auto x = torch::full({3, 8}, 0.1 * (self.rank + 1)).requires_grad_();
      auto loss = model->forward(x).sum();
      if (on_host && saved->stats().kept == 0) throw std::runtime_error("nothing was saved");
      if (pass == 1) saved.reset();
      loss.backward();
    }
    return ddp::testing::gradients_of(*net);
  };
  const auto with = run_ranks<std::vector<at::Tensor>>(
      2, [&](const Rank& self) { return gradients(self, true); });
  const auto without = run_ranks<std::vector<at::Tensor>>(
      2, [&](const Rank& self) { return gradients(self, false); });
  for (size_t rank = 0; rank < 2; ++rank) CHECK(all_equal(with[rank], without[rank]));
}

TEST_CASE("first guards on several threads at once", "[saved][once]") {
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      Counts counts;
      const SavedTensorHooks hooks(counts.copies());
      const auto x = torch::full({4}, 3.0).requires_grad_();
      x.square().sum().backward();
      if (counts.packed > 0 && torch::equal(x.grad(), torch::full({4}, 6.0))) ++right;
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(right == 8);
}
