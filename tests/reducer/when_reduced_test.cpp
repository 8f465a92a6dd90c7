// Who is told that a bucket is reduced, and what a profiler sees.
#include <mutex>
#include <set>

#include <ATen/record_function.h>
#include <ddp/internal/reducer.h>
#include <torch/torch.h>

#include "reducer/passes.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using testing::errors_of_ranks;
using testing::parameter;
using testing::Rank;
using testing::run_ranks;

/// Two parameters in a bucket each.
struct Two {
  Two(const Rank& self, ReducerOptions options)
      : rank(self.rank), reducer(parameters, self.group, options.bucket_cap_mb_list({1e-6})) {
    reducer.when_reduced([this](const std::vector<at::Tensor>& reduced, bool last) {
      for (const auto& p : reduced) {
        const bool first = p.is_same(parameters[0].tensor);
        told += first ? "a" : "b";
        told += p.grad().defined() ? std::to_string(p.grad()[0].item<int>()) : "-";
      }
      told += last ? "." : ",";
      if (throws) throw std::runtime_error("what was told threw");
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
  std::string told;
  bool throws = false;
  std::vector<NamedParameter> parameters{{"a", parameter()}, {"b", parameter()}};
  Reducer reducer;
};

}  // namespace

TEST_CASE("each bucket is told once its gradients are final", "[ranks][when_reduced]") {
  const auto told = run_ranks<std::string>(2, [](const Rank& self) {
    Two two(self, {});
    two.backward();
    two.backward();  // accumulates
    two.reducer.prepare_for_local_backward();
    two.parameters[0].tensor.sum().backward();
    two.reducer.join_backward();
    return two.told;
  });
  CHECK(told[0] == "b2,a2.a4,b4.a5,b0.");
  CHECK(told[1] == told[0]);
}

TEST_CASE("a bucket is told while a later one is on its way", "[ranks][when_reduced]") {
  const auto told = run_ranks<int>(1, [](const Rank& self) {
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
    reducer.when_reduced([&](const std::vector<at::Tensor>&, bool last) {
      ++calls;
      if (!last) later->markCompleted(sum);  // else the pass would wait for it for good
    });
    testing::reduced_backward(reducer, [&] { return a.sum() + b.sum(); });
    return calls;
  });
  CHECK(told[0] == 2);
}

TEST_CASE("where a pass may skip parameters, too", "[ranks][when_reduced]") {
  const auto told = run_ranks<std::string>(2, [](const Rank& self) {
    Two two(self, ReducerOptions().find_unused_parameters(true));
    two.backward(/*both=*/self.rank == 0);
    two.parameters[0].tensor.mutable_grad().reset();
    two.backward(/*both=*/false);
    return two.told;
  });
  // The first: rank 0's gradient is averaged with zeros. The second: on no rank.
  CHECK(told[0] == "b2,a0.b4,a-.");
  CHECK(told[1] == told[0]);
}

TEST_CASE("what it throws comes out of backward, when all is reduced", "[ranks][when_reduced]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) -> std::string {
    Two two(self, {});
    two.throws = self.rank == 1;
    std::string error;
    try {
      two.backward();
    } catch (const std::runtime_error& e) {
      error = e.what();
    }
    two.throws = false;
    two.backward();  // the ranks are in step
    return error + two.told;
  });
  CHECK(errors[0] == "b2,a2.a4,b4.");
  CHECK(errors[1] == "what was told threwb2,a4,b4.");
}

TEST_CASE("a failing pass tells the same buckets on every rank", "[ranks][when_reduced]") {
  const auto told = run_ranks<std::string>(2, [](const Rank& self) {
    Two two(self, {});
    try {
      two.backward(/*both=*/self.rank == 0);
    } catch (const c10::Error&) {
      two.told += "!";
    }
    for (const auto& p : two.parameters) p.tensor.mutable_grad().reset();
    two.backward();
    return two.told;
  });
  CHECK(told[0] == "b2,!b2,a2.");
  CHECK(told[1] == told[0]);
}

TEST_CASE("a gradient of another kind is replaced by the average", "[ranks][when_reduced]") {
  const bool shorter = GENERATE(false, true);
  const auto seen = run_ranks<std::string>(2, [&](const Rank& self) {
    const auto a = parameter(), b = parameter();
    const auto replaced_first = testing::after_gradient(b, [&] {
      if (self.rank == 0) return;
      b.mutable_grad() = shorter ? torch::ones({1}) : torch::ones({3}, at::kHalf);
    });
    Reducer reducer({{"a", a}, {"b", b}}, self.group, ReducerOptions().bucket_cap_mb_list({1e-6}));
    std::string told;
    reducer.when_reduced([&](const std::vector<at::Tensor>& reduced, bool) {
      const auto grad = reduced[0].grad();
      told += c10::str(grad.sizes(), " ", grad.scalar_type(), " ", grad[0].item<float>(), ";");
    });
    try {
      testing::reduced_backward(reducer, [&] { return (a.sum() + b.sum()) * 3; });
    } catch (const c10::Error&) {
      told += "error";
    }
    return told;
  });
  // Rank 1's counts as zeros. Nothing is written beyond it, and the ranks stay alike.
  CHECK(seen[0] == "[3] Float 1.5;error");
  CHECK(seen[1] == seen[0]);
}

TEST_CASE("one function is told", "[ranks][when_reduced][errors]") {
  const auto errors = errors_of_ranks(1, [](const Rank& self) {
    Two two(self, {});
    two.reducer.when_reduced([](const auto&, bool) {});
  });
  CHECK_THAT(errors[0], ContainsText("expected one function to call with reduced gradients"));
}

TEST_CASE("profilers see the reducer's ranges", "[ranks][profile]") {
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
