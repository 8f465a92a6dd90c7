#include <chrono>

#include <ddp/collectives.h>
#include <ddp/comm_hooks.h>
#include <ddp/internal/reducer.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

// One reduced step with loss = (rank + 1) * sum(w): the mean gradient is (size + 1) / 2.
at::Tensor averaged_gradient(const Rank& self, bool as_views, const CommHook& hook) {
  auto w = torch::ones({3, 2}).set_requires_grad(true);
  auto v = torch::ones({4}).set_requires_grad(true);
  Reducer reducer(
      {{"w", w}, {"v", v}}, self.group, ReducerOptions().gradient_as_bucket_view(as_views));
  if (hook) reducer.register_comm_hook(hook);
  for (int i = 0; i < 3; ++i) {
    w.mutable_grad().reset();
    v.mutable_grad().reset();
    reducer.prepare_for_forward();
    const auto sum_w = w.sum();
    const auto sum_v = v.sum();  // later in forward, so its gradient is ready first
    const auto loss = (sum_w + sum_v) * (self.rank + 1);
    reducer.prepare_for_backward();
    loss.backward();
  }
  return torch::cat({w.grad().flatten(), v.grad()});
}

}  // namespace

TEST_CASE("every built-in hook averages", "[ranks][comm_hooks][many]") {
  const int size = GENERATE(1, 2, 3);
  const bool as_views = GENERATE(false, true);
  const std::string name = GENERATE("none", "all_reduce", "fp16", "bf16", "around");
  CAPTURE(size, as_views, name);
  const auto gradients = run_ranks<at::Tensor>(size, [&](const Rank& self) {
    CommHook hook;
    if (name == "all_reduce") hook = hooks::all_reduce(self.group);
    if (name == "fp16") hook = hooks::fp16_compress(self.group);
    if (name == "bf16") hook = hooks::bf16_compress(self.group);
    if (name == "around") hook = hooks::bf16_compress_wrapper(hooks::all_reduce(self.group));
    return averaged_gradient(self, as_views, hook);
  });
  // A third is not representable: allows a few units of the wire's precision.
  const double tolerance = name == "fp16" ? 2e-3 : name == "bf16" || name == "around" ? 2e-2 : 1e-6;
  for (const auto& gradient : gradients) {
    CHECK(torch::allclose(gradient, torch::full({10}, (size + 1) / 2.0), 0, tolerance));
    CHECK(torch::equal(gradient, gradients[0]));
  }
}

TEST_CASE("hooks in half precision average sparse gradients", "[ranks][comm_hooks]") {
  const std::string name = GENERATE("fp16", "bf16", "around");
  const auto gradients = run_ranks<at::Tensor>(2, [&](const Rank& self) {
    const auto table = torch::ones({4, 2}).set_requires_grad(true);
    Reducer reducer({{"table", table, /*expect_sparse=*/true}}, self.group);
    reducer.register_comm_hook(
        name == "fp16"   ? hooks::fp16_compress(self.group)
        : name == "bf16" ? hooks::bf16_compress(self.group)
                         : hooks::fp16_compress_wrapper(hooks::all_reduce(self.group)));
    for (int pass = 0; pass < 2; ++pass) {
      reducer.prepare_for_forward();
      const auto rows = torch::embedding(
          table, torch::tensor({self.rank, 2}, torch::kLong), /*padding_idx=*/-1,
          /*scale_grad_by_freq=*/false, /*sparse=*/true);
      const auto loss = rows.sum() * 3;
      reducer.prepare_for_backward();
      loss.backward();
    }
    return table.grad().to_dense();
  });
  const auto expected = torch::tensor({{3.0f, 3.0f}, {3.0f, 3.0f}, {6.0f, 6.0f}, {0.0f, 0.0f}});
  for (const auto& gradient : gradients) CHECK(torch::equal(gradient, expected));
}

TEST_CASE("a hook gets undivided gradients and may return another tensor", "[ranks][comm_hooks]") {
  const bool as_views = GENERATE(false, true);
  const auto gradients = run_ranks<at::Tensor>(2, [&](const Rank& self) {
    const CommHook hook = [](GradBucket& bucket) {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(bucket.buffer() * 10);
      return future;
    };
    return averaged_gradient(self, as_views, hook);
  });
  CHECK(torch::equal(gradients[0], torch::full({10}, 10.0)));
  CHECK(torch::equal(gradients[1], torch::full({10}, 20.0)));
}

TEST_CASE("noop leaves every rank its own gradients", "[ranks][comm_hooks]") {
  const auto gradients = run_ranks<at::Tensor>(
      2, [](const Rank& self) { return averaged_gradient(self, false, hooks::noop()); });
  CHECK(torch::equal(gradients[0], torch::full({10}, 1.0)));
  CHECK(torch::equal(gradients[1], torch::full({10}, 2.0)));
}

TEST_CASE("a wrapped hook gets half precision", "[ranks][comm_hooks]") {
  run_ranks<int>(2, [](const Rank& self) {
    const auto inner = hooks::all_reduce(self.group);
    const CommHook checks = [&](GradBucket& bucket) {
      TORCH_CHECK(bucket.buffer().scalar_type() == at::kHalf);
      TORCH_CHECK(bucket.gradients()[0].scalar_type() == at::kHalf);
      TORCH_CHECK(bucket.gradients()[0].is_alias_of(bucket.buffer()));
      return inner(bucket);
    };
    const auto gradient = averaged_gradient(self, false, hooks::fp16_compress_wrapper(checks));
    TORCH_CHECK(torch::equal(gradient, torch::full({10}, 1.5)));
    return 0;
  });
  CHECK_THAT(error_of([] { hooks::fp16_compress_wrapper({}); }), ContainsText("empty function"));
}

TEST_CASE("a hook gets the bucket's parameters and gradients", "[ranks][comm_hooks]") {
  const auto seen = run_ranks<std::string>(2, [&](const Rank& self) {
    std::string text;
    const auto inner = hooks::all_reduce(self.group);
    const CommHook hook = [&](GradBucket& bucket) {
      text = c10::str(
          bucket.index(), " ", bucket.is_last(), " ", bucket.buffer().sizes(), " ",
          bucket.gradients().size(), " ", bucket.gradients()[0].sizes(), " ",
          bucket.parameters()[0].sizes(), " ", bucket.gradients()[0].sum().item<float>());
      return inner(bucket);
    };
    averaged_gradient(self, false, hook);
    return text;
  });
  CHECK(seen[0] == "0 1 [10] 2 [4] [4] 4");
  CHECK(seen[1] == "0 1 [10] 2 [4] [4] 8");
}

TEST_CASE("hooks are set once, before the first backward pass", "[ranks][errors][comm_hooks]") {
  const auto errors = errors_of_ranks(1, [](const Rank& self) {
    auto w = torch::ones({2}).set_requires_grad(true);
    Reducer reducer({{"w", w}}, self.group);
    reducer.register_comm_hook(hooks::all_reduce(self.group));
    reducer.register_comm_hook(hooks::all_reduce(self.group));
  });
  CHECK_THAT(errors[0], ContainsText("registered already"));
  const auto late = errors_of_ranks(1, [](const Rank& self) {
    auto w = torch::ones({2}).set_requires_grad(true);
    Reducer reducer({{"w", w}}, self.group);
    reducer.prepare_for_forward();
    const auto loss = w.sum();
    reducer.prepare_for_backward();
    loss.backward();
    reducer.register_comm_hook(hooks::all_reduce(self.group));
  });
  CHECK_THAT(late[0], ContainsText("before the first backward pass"));
  const auto empty = errors_of_ranks(1, [](const Rank& self) {
    Reducer({{"w", torch::ones({2}).set_requires_grad(true)}}, self.group).register_comm_hook({});
  });
  CHECK_THAT(empty[0], ContainsText("empty function"));
}

TEST_CASE("a hook may return a list of one, and any strides", "[ranks][comm_hooks]") {
  const bool list = GENERATE(false, true);
  const bool as_views = GENERATE(false, true);
  const auto gradients = run_ranks<at::Tensor>(2, [&](const Rank& self) {
    return averaged_gradient(self, as_views, [&](GradBucket& bucket) {
      if (list) {
        std::vector<at::Tensor> tensors{bucket.buffer().div_(self.size)};
        return self.group->allreduce(tensors)->getFuture();
      }
      // Every other element of a tensor that is twice as long: all are 7.
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      const auto wide = torch::stack(
          {torch::full({bucket.buffer().numel()}, 7.0f), torch::zeros({bucket.buffer().numel()})},
          1);
      future->markCompleted(wide.select(1, 0));
      return future;
    });
  });
  for (const auto& gradient : gradients) {
    CHECK(torch::equal(gradient, torch::full_like(gradient, list ? 1.5 : 7.0)));
  }
}

TEST_CASE("a hook's wrong result is an error that describes it", "[ranks][errors][comm_hooks]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    averaged_gradient(self, false, [](GradBucket& bucket) {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(bucket.buffer().slice(0, 0, 1));
      return future;
    });
  });
  CHECK_THAT(
      errors,
      Each(ContainsText("to return 10 elements of Float on cpu, layout Strided, got 1 elements")));
}

TEST_CASE(
    "a hook's wrong result on one rank is an error on all", "[ranks][errors][comm_hooks][many]") {
  const auto begin = std::chrono::steady_clock::now();
  const auto error = error_of_all(3, kLongTimeout, [](const Rank& self) {
    int calls = 0;
    averaged_gradient(self, false, [&](GradBucket& bucket) {
      const auto whole = hooks::all_reduce(self.group)(bucket);
      if (self.rank != 0 || ++calls < 2) return whole;
      whole->wait();  // so that the pass of the other ranks has no error
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(bucket.buffer().slice(0, 0, 1));
      return future;
    });
  });
  CHECK_THAT(
      error,
      ContainsText(
          "reducing bucket 0 of 1 (40 bytes: v, w) in backward pass 2 failed on rank 0 of 3") &&
          ContainsText("got 1 elements") && ContainsText("aborted"));
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
}

TEST_CASE("a failing hook does not abort a group of one", "[ranks][errors][comm_hooks]") {
  const auto errors = errors_of_ranks(1, [](const Rank& self) {
    const auto fails = [](GradBucket&) -> c10::intrusive_ptr<c10::ivalue::Future> {
      TORCH_CHECK(false, "boom");
    };
    const auto error = error_of([&] { averaged_gradient(self, false, fails); });
    TORCH_CHECK(error.find("boom") != std::string::npos, error);
    barrier(self.group);
  });
  CHECK(errors[0].empty());
}

}  // namespace ddp
