// find_unused_parameters: the graph search, and the launch of buckets with unused parameters.
#include <ddp/internal/reducer.h>
#include <torch/torch.h>

#include "reducer/autograd/graph_search.h"
#include "reducer/autograd/usage_policy.h"
#include "reducer/passes.h"
#include "support/ranks.h"
#include "support/recording_backend.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

std::vector<char> reachable(
    const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& outputs) {
  std::vector<NodePtr> accumulators;
  for (const auto& p : parameters) {
    accumulators.push_back(torch::autograd::impl::grad_accumulator(p));
  }
  GraphSearch search(accumulators);
  ForwardOutputs forward;
  const auto nodes = forward.add(outputs, true);
  search.reachable(nodes);
  return search.reachable(nodes);  // the second search must not depend on the first
}

}  // namespace

TEST_CASE("the search finds the parameters that outputs lead to", "[pure][unused]") {
  const auto a = parameter({4}), b = parameter({4}), c = parameter({4});
  const std::vector<at::Tensor> all{a, b, c};
  CHECK(reachable(all, {}) == std::vector<char>{0, 0, 0});
  CHECK(reachable(all, {a * 2 + c}) == std::vector<char>{1, 0, 1});
  CHECK(reachable(all, {(a * 2).sum(), b.sum()}) == std::vector<char>{1, 1, 0});
  CHECK(reachable(all, {b}) == std::vector<char>{0, 1, 0});  // the parameter itself
  CHECK(reachable(all, {(a * b).detach()}) == std::vector<char>{0, 0, 0});
  CHECK(reachable(all, {at::Tensor(), torch::ones({1})}) == std::vector<char>{0, 0, 0});
  auto deep = a * 1;
  for (int i = 0; i < 50000; ++i) deep = deep + c;  // a recursive search would overflow the stack
  CHECK(reachable(all, {deep}) == std::vector<char>{1, 0, 1});
}

TEST_CASE("a graph like the last one is not searched again", "[pure][unused]") {
  const auto a = parameter({4}), b = parameter({4}), c = parameter({4});
  std::vector<NodePtr> accumulators;
  for (const auto& p : {a, b, c}) {
    accumulators.push_back(torch::autograd::impl::grad_accumulator(p));
  }
  GraphSearch search(accumulators);
  const auto found = [&](const std::vector<at::Tensor>& outputs) {
    ForwardOutputs forward;
    const auto nodes = forward.add(outputs, true);
    const bool same = search.has_last_shape(nodes);
    return std::make_pair(search.reachable(nodes), same);
  };
  using Found = std::pair<std::vector<char>, bool>;
  const auto x = [] { return torch::ones({4}); };
  CHECK(found({(a * b).sum()}) == Found({1, 1, 0}, false));
  CHECK(found({(a * b).sum()}) == Found({1, 1, 0}, true));
  // The same shape with other parameters, another order, or one parameter twice.
  CHECK(found({(a * c).sum()}) == Found({1, 0, 1}, false));
  CHECK(found({(c * a).sum()}) == Found({1, 0, 1}, false));
  CHECK(found({(c * c).sum()}) == Found({0, 0, 1}, false));
  CHECK(found({(c * c).sum()}) == Found({0, 0, 1}, true));
  // A parameter in the place of another leaf, and vice versa; such leaves are new in each graph.
  CHECK(found({(a * x().set_requires_grad(true)).sum()}) == Found({1, 0, 0}, false));
  CHECK(found({(a * x().set_requires_grad(true)).sum()}) == Found({1, 0, 0}, true));
  CHECK(found({(a * b).sum()}) == Found({1, 1, 0}, false));
  CHECK(found({(a * x().set_requires_grad(true)).sum()}) == Found({1, 0, 0}, false));
  CHECK(found({(a * x()).sum()}) == Found({1, 0, 0}, false));  // an edge without a function
  CHECK(found({(a * x()).sum()}) == Found({1, 0, 0}, true));
  // One output more or less, deeper or shallower, joined or apart.
  const auto doubled = [](const at::Tensor& t) { return t * 2; };
  const auto first = a * 1;
  CHECK(found({first, doubled(first)}) == Found({1, 0, 0}, false));
  CHECK(found({first}) == Found({1, 0, 0}, false));
  CHECK(found({doubled(doubled(a))}) == Found({1, 0, 0}, false));
  CHECK(found({doubled(a)}) == Found({1, 0, 0}, false));
  const auto joined = b * 1;
  CHECK(found({joined * joined}) == Found({0, 1, 0}, false));
  CHECK(found({(b * 1) * (b * 1)}) == Found({0, 1, 0}, false));
  CHECK(found({}) == Found({0, 0, 0}, false));
  CHECK(found({}) == Found({0, 0, 0}, true));
}

TEST_CASE("a known unused parameter does not delay its bucket", "[pure][unused]") {
  Events events;
  const auto first = parameter({4}), unused = parameter({4});
  first.register_hook([&](const at::Tensor&) { events.push_back("gradient"); });
  const bool complete = GENERATE(true, false);
  // Launch order is the reverse of registration: the unused parameter's bucket is due first.
  Reducer reducer(
      {{"first", first}, {"unused", unused}}, recording_group(0, 2, events),
      ReducerOptions().bucket_cap_mb(1e-6).find_unused_parameters(true));
  reducer.prepare_for_forward();
  const auto loss = first.sum();
  reducer.prepare_for_backward({{loss}, complete});
  loss.backward();
  // Four gradients, four more, eleven of status and two flags.
  if (complete) CHECK(events == Events{"allreduce 4", "gradient", "allreduce 23"});
  if (!complete) CHECK(events == Events{"gradient", "allreduce 4", "allreduce 23"});
  CHECK_FALSE(unused.grad().defined());
}

TEST_CASE("outputs that the loss leaves out block no rank", "[ranks][unused]") {
  const bool as_views = GENERATE(false, true);
  const auto results = run_ranks<std::vector<float>>(2, [&](const Rank& self) {
    const auto a = parameter({4}), b = parameter({4}), c = parameter({4});
    Reducer reducer(
        {{"a", a}, {"b", b}, {"c", c}}, self.group,
        ReducerOptions().bucket_cap_mb(1e-6).find_unused_parameters(true).gradient_as_bucket_view(
            as_views));
    std::vector<float> seen;
    for (int step = 0; step < 4; ++step) {
      for (const auto& p : {a, b, c}) p.mutable_grad().reset();
      reducer.prepare_for_forward();
      const auto first = a.sum() * (self.rank + 1);
      const auto second = (b.sum() + c.sum()) * (self.rank + 1);
      reducer.prepare_for_backward({{first, second}, true});
      // Control flow that differs: rank 1 uses both outputs in odd steps, rank 0 never.
      (self.rank == 1 && step % 2 ? first + second : first).backward();
      seen.push_back(a.grad()[0].item<float>());
      seen.push_back(b.grad().defined() ? b.grad()[0].item<float>() : -1);
    }
    return seen;
  });
  // b: the average of nothing and 2; -1 stands for untouched.
  for (const auto& seen : results) {
    CHECK(seen == std::vector<float>{1.5, -1, 1.5, 1, 1.5, -1, 1.5, 1});
  }
}

TEST_CASE("usage under no_sync counts for the next reduced pass", "[ranks][unused]") {
  const auto results = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    const auto a = parameter({4}), b = parameter({4});
    Reducer reducer(
        {{"a", a}, {"b", b}}, self.group, ReducerOptions().find_unused_parameters(true));
    std::vector<float> seen;
    for (int step = 0; step < 3; ++step) {
      a.mutable_grad().reset();
      b.mutable_grad().reset();
      reducer.prepare_for_local_backward();
      (a.sum() + b.sum() * (self.rank + 1)).backward();
      reducer.prepare_for_forward();
      const auto loss = a.sum();
      reducer.prepare_for_backward({{loss}, true});
      loss.backward();
      seen.push_back(a.grad()[0].item<float>());
      seen.push_back(b.grad()[0].item<float>());
    }
    return seen;
  });
  for (const auto& seen : results) CHECK(seen == std::vector<float>{2, 1.5, 2, 1.5, 2, 1.5});
}

TEST_CASE("two forwards for one backward use both their parameters", "[ranks][unused]") {
  const auto results = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    const auto a = parameter({4}), b = parameter({4});
    Reducer reducer(
        {{"a", a}, {"b", b}}, self.group,
        ReducerOptions().bucket_cap_mb(1e-6).find_unused_parameters(true));
    reducer.prepare_for_forward();
    const auto first = a.sum() * (self.rank + 1);
    reducer.prepare_for_backward({{first}, true});
    reducer.prepare_for_forward();
    const auto second = b.sum() * (self.rank + 1);
    reducer.prepare_for_backward({{second}, true});
    (first + second).backward();
    return std::vector<float>{a.grad()[0].item<float>(), b.grad()[0].item<float>()};
  });
  for (const auto& seen : results) CHECK(seen == std::vector<float>{1.5, 1.5});
}

TEST_CASE("a gradient that the outputs do not lead to is an error", "[ranks][errors][unused]") {
  const auto error = error_of_all(2, [](const Rank& self) {
    const auto a = parameter({4}), b = parameter({4});
    Reducer reducer(
        {{"a", a}, {"b", b}}, self.group,
        ReducerOptions().bucket_cap_mb(1e-6).find_unused_parameters(true));
    reducer.prepare_for_forward();
    const auto a_sum = a.sum();
    reducer.prepare_for_backward({{a_sum}, true});
    // b reaches the loss without being an output of forward, and its bucket was launched first.
    (a_sum + b.sum()).backward();
  });
  CHECK_THAT(error, ContainsText("a gradient came although"));
}

TEST_CASE("a warning follows ten passes that skipped no parameter", "[ranks][unused]") {
  const int skips = GENERATE(-1, 5);
  const WarnAlways always;
  const auto counts = run_ranks<std::vector<int>>(1, [&](const Rank& self) {
    const auto a = parameter({4}), b = parameter({4});
    Reducer reducer(
        {{"a", a}, {"b", b}}, self.group, ReducerOptions().find_unused_parameters(true));
    const Warnings warnings;
    std::vector<int> counts;
    for (int step = 0; step < 12; ++step) {
      testing::reduced_backward(
          reducer, [&] { return step == skips ? a.sum() : a.sum() + b.sum(); });
      counts.push_back(warnings.count("find_unused_parameters is set, but every parameter"));
    }
    return std::vector<int>{counts[8], counts[9], counts[11]};
  });
  CHECK(counts[0] == (skips < 0 ? std::vector<int>{0, 1, 1} : std::vector<int>{0, 0, 0}));
}

}  // namespace ddp
