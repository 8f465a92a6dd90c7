// The on_bucket_reduced() callback, and the ranges that a profiler records.
#include <mutex>
#include <set>

#include <ATen/record_function.h>
#include <ddp/internal/reducer.h>
#include <torch/torch.h>

#include "reducer/passes.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

/// Two parameters in a bucket each.
struct Two {
  Two(const Rank& self, ReducerOptions options)
      : rank(self.rank), reducer(parameters, self.group, options.bucket_cap_mb_list({1e-6})) {
    reducer.on_bucket_reduced([this](const std::vector<at::Tensor>& reduced, bool last) {
      for (const auto& p : reduced) {
        const bool first = p.is_same(parameters[0].tensor);
        calls += first ? "a" : "b";
        calls += p.grad().defined() ? std::to_string(p.grad()[0].item<int>()) : "-";
      }
      calls += last ? "." : ",";
      if (throws) throw std::runtime_error("the callback threw");
    });
  }

  void backward(bool both = true) {
    reducer.prepare_for_forward();
    auto loss = parameters[1].tensor.sum();
    if (both) loss = loss + parameters[0].tensor.sum();
    loss = loss * (2.0 * rank + 1);
    reducer.prepare_for_backward({{loss}, true});
    loss.backward();
  }

  int rank;
  std::string calls;
  bool throws = false;
  std::vector<NamedParameter> parameters{{"a", parameter()}, {"b", parameter()}};
  Reducer reducer;
};

}  // namespace

TEST_CASE(
    "the callback gets each bucket once its gradients are final", "[ranks][on_bucket_reduced]") {
  const auto calls = run_ranks<std::string>(2, [](const Rank& self) {
    Two two(self, {});
    two.backward();
    two.backward();  // accumulates
    two.reducer.prepare_for_local_backward();
    two.parameters[0].tensor.sum().backward();
    PassTerms terms;
    terms.adds = true;
    two.reducer.join_backward(terms);
    return two.calls;
  });
  CHECK(calls[0] == "b2,a2.a4,b4.a5,b4.");
  CHECK(calls[1] == calls[0]);
}

TEST_CASE("the callback gets a bucket while a later one is reduced", "[ranks][on_bucket_reduced]") {
  const auto counts = run_ranks<int>(1, [](const Rank& self) {
    const auto a = parameter(), b = parameter();
    Reducer reducer({{"a", a}, {"b", b}}, self.group, ReducerOptions().bucket_cap_mb_list({1e-6}));
    c10::intrusive_ptr<c10::ivalue::Future> later;
    at::Tensor sum;
    reducer.register_comm_hook([&](GradBucket& bucket) {
      later = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      sum = bucket.buffer();
      if (!bucket.is_last()) later->markCompleted(sum);
      return later;
    });
    int calls = 0;
    reducer.on_bucket_reduced([&](const std::vector<at::Tensor>&, bool last) {
      ++calls;
      if (!last) later->markCompleted(sum);  // the pass would never end otherwise
    });
    testing::reduced_backward(reducer, [&] { return a.sum() + b.sum(); });
    return calls;
  });
  CHECK(counts[0] == 2);
}

TEST_CASE(
    "the callback gets the buckets with find_unused_parameters", "[ranks][on_bucket_reduced]") {
  const auto calls = run_ranks<std::string>(2, [](const Rank& self) {
    Two two(self, ReducerOptions().find_unused_parameters(true));
    two.backward(/*both=*/self.rank == 0);
    two.parameters[0].tensor.mutable_grad().reset();
    two.backward(/*both=*/false);
    return two.calls;
  });
  // In the first pass rank 0's gradient is averaged with zeros; in the second no rank has one.
  CHECK(calls[0] == "b2,a0.b4,a-.");
  CHECK(calls[1] == calls[0]);
}

TEST_CASE(
    "backward throws the exception of the callback, and the other ranks stop after it",
    "[ranks][on_bucket_reduced]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) -> std::string {
    Two two(self, {});
    two.throws = self.rank == 1;
    const auto error = error_of([&] {
      two.backward();
      two.backward();
    });
    if (self.rank == 1) self.wait_until_others_end();
    return two.calls + error;
  });
  CHECK_THAT(
      errors[0], Catch::StartsWith("b2,a2.a step in the backward pass threw on rank 1 of 2, whose "
                                   "model is no longer the others': the callback threw"));
  CHECK(errors[1] == "b2,the callback threw");
}

TEST_CASE(
    "a failing pass calls the callback for the same buckets on every rank",
    "[ranks][on_bucket_reduced]") {
  const auto calls = run_ranks<std::string>(2, [](const Rank& self) {
    Two two(self, {});
    try {
      two.backward(/*both=*/self.rank == 0);
    } catch (const c10::Error&) {
      two.calls += "!";
    }
    for (const auto& p : two.parameters) p.tensor.mutable_grad().reset();
    two.backward();
    return two.calls;
  });
  CHECK(calls[0] == "b2,!b2,a2.");
  CHECK(calls[1] == calls[0]);
}

TEST_CASE("a gradient of another kind is replaced by the average", "[ranks][on_bucket_reduced]") {
  const bool shorter = GENERATE(false, true);
  const auto seen = run_ranks<std::string>(2, [&](const Rank& self) {
    const auto a = parameter(), b = parameter();
    const auto replaced_first = testing::after_gradient(b, [&] {
      if (self.rank == 0) return;
      b.mutable_grad() = shorter ? torch::ones({1}) : torch::ones({3}, at::kHalf);
    });
    Reducer reducer({{"a", a}, {"b", b}}, self.group, ReducerOptions().bucket_cap_mb_list({1e-6}));
    std::string calls;
    reducer.on_bucket_reduced([&](const std::vector<at::Tensor>& reduced, bool) {
      const auto grad = reduced[0].grad();
      calls += c10::str(grad.sizes(), " ", grad.scalar_type(), " ", grad[0].item<float>(), ";");
    });
    try {
      testing::reduced_backward(reducer, [&] { return (a.sum() + b.sum()) * 3; });
    } catch (const c10::Error&) {
      calls += "error";
    }
    return calls;
  });
  // Rank 1's gradient counts as zeros. Nothing is written beyond it, and the ranks stay equal.
  CHECK(seen[0] == "[3] Float 1.5;error");
  CHECK(seen[1] == seen[0]);
}

TEST_CASE("a second callback is refused", "[ranks][on_bucket_reduced][errors]") {
  const auto errors = errors_of_ranks(1, [](const Rank& self) {
    Two two(self, {});
    two.reducer.on_bucket_reduced([](const auto&, bool) {});
  });
  CHECK_THAT(errors[0], ContainsText("expected one function to call with reduced gradients"));
}

TEST_CASE("profilers record the reducer's ranges", "[ranks][profile]") {
  static std::mutex mutex;
  static std::multiset<std::string> names;
  names.clear();
  const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& range) -> std::unique_ptr<at::ObserverContext> {
        const std::lock_guard lock(mutex);
        names.insert(range.name());
        return nullptr;
      }));
  run_ranks<int>(2, [](const Rank& self) {
    Two two(self, {});
    two.backward();
    two.backward();
    return 0;
  });
  at::removeCallback(handle);
  CHECK(names.count("ddp::launch_bucket 0") == 4);
  CHECK(names.count("ddp::launch_bucket 1") == 4);
  CHECK(names.count("ddp::wait_for_buckets") == 4);
  CHECK(names.count("ddp::rebuild_buckets") == 2);
}

}  // namespace ddp
