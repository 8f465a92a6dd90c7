// The number of allocations by the hooks: it must not grow with the number of parameters.
#include <atomic>
#include <cstdlib>
#include <new>

#include <ddp/internal/autograd_node.h>
#include <ddp/internal/reducer.h>
#include <torch/torch.h>

#include "support/ranks.h"

#include "support/catch.h"

namespace {
std::atomic<long> allocations{0};
}

// Replaces every `new` of the process, LibTorch's included.
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(size);
}
[[gnu::noinline]] void* operator new(size_t size) {
  if (void* memory = operator new(size, std::nothrow)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace ddp {
namespace {

struct Setting {
  bool as_views, find_unused, static_graph;
  int64_t stats_every;
};

// Autograd keeps vectors of the gradients of every node that has hooks, before and after it: the
// comparison has hooks as well, so that both runs allocate them.
class NoHook : public torch::autograd::FunctionPostHook {
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& /*gradients*/) override {
    return outputs;
  }
};

class NoPreHook : public torch::autograd::FunctionPreHook {
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    return gradients;
  }
};

// Allocations in the last of a few backward passes over `count` parameters, with a reducer's hooks
// or with hooks that do nothing. Most of them are autograd's own.
long allocations_in_backward(int count, const Setting* setting, const testing::Rank& self) {
  std::vector<NamedParameter> parameters;
  for (int i = 0; i < count; ++i) {
    parameters.push_back({"p", torch::ones({8}).set_requires_grad(true)});
  }
  std::unique_ptr<Reducer> reducer;
  if (setting) {
    reducer = std::make_unique<Reducer>(
        parameters, self.group,
        ReducerOptions()
            .gradient_as_bucket_view(setting->as_views)
            .find_unused_parameters(setting->find_unused)
            .static_graph(setting->static_graph)
            .stats_every(setting->stats_every));
  }
  std::vector<NodePtr> accumulators;
  for (size_t i = 0; !reducer && i < parameters.size(); ++i) {
    accumulators.push_back(torch::autograd::impl::grad_accumulator(parameters[i].tensor));
    accumulators.back()->add_pre_hook(std::make_unique<NoPreHook>());
    accumulators.back()->add_post_hook(std::make_unique<NoHook>());
  }
  long seen = 0;
  for (int step = 0; step < 12; ++step) {  // the last is not sampled for stats()
    // Passes without a zero_grad() add up, and each sum is new memory. Views of buckets stay here.
    for (auto& p : parameters) {
      if (!setting || !setting->as_views) p.tensor.mutable_grad().reset();
    }
    if (reducer) reducer->prepare_for_forward();
    at::Tensor loss = torch::zeros({});
    for (const auto& p : parameters) loss = loss + p.tensor.sum();
    if (reducer) reducer->prepare_for_backward({{loss}, true});
    const long before = allocations;
    loss.backward();
    seen = allocations - before;
  }
  return seen;
}

}  // namespace

TEST_CASE("hooks allocate nothing in steady state", "[ranks][cost]") {
  const bool as_views = GENERATE(false, true);
  const int mode = GENERATE(0, 1, 2);
  const int64_t stats_every = GENERATE(0, 100);
  const Setting setting{as_views, mode == 1, mode == 2, stats_every};
  CAPTURE(as_views, mode, stats_every);
  struct Seen {
    long few, many;
  };
  const auto seen = testing::run_ranks<Seen>(1, [&](const testing::Rank& self) {
    const auto extra = [&](int count) {
      return allocations_in_backward(count, &setting, self) -
             allocations_in_backward(count, nullptr, self);
    };
    return Seen{extra(20), extra(400)};
  });
  CHECK(seen[0].few >= 0);  // the end of a pass may allocate a little
  CHECK(seen[0].few < 60);
  CHECK(seen[0].many == seen[0].few);
}

}  // namespace ddp
