#include <ddp/internal/reducer.h>
#include <torch/torch.h>

#include "reducer/passes.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

// f(x) = x * w, whose backward recomputes it and runs a backward pass of its own, as reentrant
// checkpointing does.
class Recompute : public torch::autograd::Function<Recompute> {
 public:
  static at::Tensor forward(
      torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor* w) {
    context->save_for_backward({x});
    context->saved_data["w"] = *w;  // not an input: autograd has no edge to it
    const at::NoGradGuard no_grad;
    return x * *w;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    const auto w = context->saved_data["w"].toTensor();
    const auto x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    {
      const torch::AutoGradMode grad(true);
      (x * w).backward(gradients[0]);
    }
    return {x.grad(), at::Tensor()};
  }
};

}  // namespace

TEST_CASE("static_graph averages from the first pass on", "[ranks][static_graph][many]") {
  const int size = GENERATE(1, 2, 3);
  const bool as_views = GENERATE(false, true);
  const bool hooked = GENERATE(false, true);
  const auto all = run_ranks<std::vector<float>>(size, [&](const Rank& self) {
    const auto used = parameter(), unused = parameter(), mine = parameter();
    Reducer reducer(
        {{"used", used}, {"unused", unused}, {"mine", mine}}, self.group,
        ReducerOptions().static_graph(true).bucket_cap_mb(1e-6).gradient_as_bucket_view(as_views));
    if (hooked) reducer.register_comm_hook(hooks::all_reduce(self.group));
    std::vector<float> seen;
    for (int step = 1; step <= 5; ++step) {
      used.mutable_grad().reset();
      mine.mutable_grad().reset();
      // Each rank has its own set of used parameters: only rank 0 uses "mine".
      reduced_backward(reducer, [&] {
        const auto loss = used.sum() * (self.rank + 1.0) * size * step;
        return self.rank == 0 ? loss + mine.sum() * size : loss;
      });
      seen.push_back(used.grad()[0].item<float>());
      seen.push_back(mine.grad()[0].item<float>());
      TORCH_CHECK(!unused.grad().defined());
    }
    TORCH_CHECK(reducer.has_rebuilt_buckets() && reducer.bucket_indices().size() == 3);
    return seen;
  });
  const float sum = size * (size + 1) / 2.0f;
  for (const auto& seen : all) {
    for (int step = 1; step <= 5; ++step) {
      CHECK(seen[2 * step - 2] == Approx(sum * step));
      CHECK(seen[2 * step - 1] == Approx(1));
    }
  }
}

TEST_CASE("static_graph allows nested passes and double use", "[ranks][static_graph]") {
  const auto all = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    const auto w = parameter(), v = parameter();
    Reducer reducer({{"w", w}, {"v", v}}, self.group, ReducerOptions().static_graph(true));
    std::vector<float> seen;
    for (int step = 0; step < 4; ++step) {
      w.mutable_grad().reset();
      v.mutable_grad().reset();
      reduced_backward(reducer, [&] {
        // Two nested passes give w two gradients; all gradients may come from nested passes.
        const auto x = torch::full({3}, self.rank + 1.0f).set_requires_grad(true);
        return Recompute::apply(Recompute::apply(Recompute::apply(x, &w), &w), &v).sum();
      });
      seen.push_back(w.grad()[0].item<float>());
      seen.push_back(v.grad()[0].item<float>());
    }
    return seen;
  });
  // d(w*w*v*x) at ones: 2x for w, x for v; the mean of x is 1.5.
  for (const auto& seen : all) CHECK(seen == std::vector<float>{3, 1.5, 3, 1.5, 3, 1.5, 3, 1.5});
}

TEST_CASE("static_graph works with local passes first", "[ranks][static_graph]") {
  const auto gradients = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    const auto w = parameter();
    Reducer reducer({{"w", w}}, self.group, ReducerOptions().static_graph(true));
    std::vector<float> seen;
    for (int step = 0; step < 4; ++step) {
      w.mutable_grad().reset();
      reducer.prepare_for_forward();
      const auto local = w.sum() * (self.rank + 1.0);
      reducer.prepare_for_local_backward();
      local.backward();
      seen.push_back(w.grad()[0].item<float>());
      reduced_backward(reducer, [&] { return w.sum() * (self.rank + 1.0); });
      seen.push_back(w.grad()[0].item<float>());
    }
    return seen;
  });
  CHECK(gradients[0] == std::vector<float>{1, 3, 1, 3, 1, 3, 1, 3});
  CHECK(gradients[1] == std::vector<float>{2, 3, 2, 3, 2, 3, 2, 3});
}

TEST_CASE("static_graph averages sparse gradients", "[ranks][static_graph]") {
  const auto gradients = run_ranks<at::Tensor>(2, [](const Rank& self) {
    const auto weight = torch::ones({4, 2}).set_requires_grad(true);
    const auto dense = torch::ones({3}).set_requires_grad(true);
    Reducer reducer(
        {{"embedding", weight, true}, {"dense", dense}}, self.group,
        ReducerOptions().static_graph(true));
    for (int step = 0; step < 4; ++step) {
      weight.mutable_grad().reset();
      dense.mutable_grad().reset();
      reducer.prepare_for_forward();
      const auto rows = torch::tensor({self.rank + 1, self.rank + 2}, at::kLong);
      const auto loss = torch::embedding(weight, rows, -1, false, true).sum() + dense.sum();
      reducer.prepare_for_backward({{loss}, true});
      loss.backward();
    }
    return torch::cat({weight.grad().to_dense().select(1, 0), dense.grad()});
  });
  const auto expected = torch::tensor({0.0, 0.5, 1.0, 0.5, 1.0, 1.0, 1.0}, at::kFloat);
  for (const auto& gradient : gradients) CHECK(torch::equal(gradient, expected));
}

TEST_CASE("a changed static graph is an error on every rank", "[ranks][errors][static_graph]") {
  const bool more = GENERATE(false, true);
  const auto error = error_of_all(2, [&](const Rank& self) {
    const auto w = parameter(), v = parameter();
    Reducer reducer({{"w", w}, {"v", v}}, self.group, ReducerOptions().static_graph(true));
    const auto loss = [&](bool both) { return both ? w.sum() + v.sum() : w.sum(); };
    for (int i = 0; i < 3; ++i) reduced_backward(reducer, [&] { return loss(!more); });
    reduced_backward(reducer, [&] { return loss((self.rank == 1) == more); });
  });
  CHECK_THAT(error, ContainsText("static_graph set to true"));
  if (more) {
    CHECK_THAT(
        error,
        ContainsText(
            "Your training graph has changed in this iteration for 1 of 2 parameters (v: ") &&
            ContainsText("on rank 1 of 2"));
  } else {
    CHECK_THAT(
        error,
        ContainsText(
            "without gradients for 1 of 2 parameters (v: not used in forward) on rank 1 of 2") &&
            ContainsText("They had some in the first iteration"));
  }
}

TEST_CASE("a parameter ready twice is an error on every rank", "[ranks][errors][reducer]") {
  const auto error = error_of_all(2, [](const Rank& self) {
    const auto w = parameter(), v = parameter();
    Reducer reducer({{"layer.w", w}, {"v", v}}, self.group);
    reduced_backward(reducer, [&] {
      const auto x = torch::ones({3}).set_requires_grad(true);
      const auto once = Recompute::apply(x, &w);
      return (self.rank == 0 ? Recompute::apply(once, &w) : once).mul(v).sum();
    });
  });
  CHECK_THAT(
      error, ContainsText("a gradient became ready twice in one backward pass for 1 of 2 "
                          "parameters (layer.w) on rank 0 of 2"));
}

}  // namespace ddp
