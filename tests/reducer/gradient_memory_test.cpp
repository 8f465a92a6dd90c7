// The reducer chooses the memory of gradients; by default a program cannot observe it in `.grad`.
#include <chrono>
#include <thread>

#include <ddp/internal/gradient_memory.h>
#include <ddp/internal/reducer.h>
#include <torch/torch.h>

#include "reducer/passes.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

/// Elements of a gradient that is not packed, where the group has memory for it.
constexpr int64_t kLarge = 32768;

/// A reducer of two parameters, whose gradients are `factor` times rank + 1. After the first step
/// each has a bucket of its own, and the first bucket is launched during backward.
struct Pair {
  explicit Pair(const Rank& self)
      : rank(self.rank), reducer(parameters, self.group, ReducerOptions().bucket_cap_mb(1e-6)) {}

  void step(double factor) {
    reduced_backward(
        reducer, [&] { return (first.sum() + second.sum()) * (factor * (rank + 1.0)); });
  }
  void zero(bool set_to_none) { torch::optim::SGD({first, second}, 0).zero_grad(set_to_none); }
  void step_from_none(double factor) {
    zero(/*set_to_none=*/true);
    step(factor);
  }

  int rank;
  at::Tensor first = parameter({kLarge});
  at::Tensor second = parameter({kLarge});
  std::vector<NamedParameter> parameters{{"first", first}, {"second", second}};
  Reducer reducer;
};

bool all_are(const at::Tensor& t, double value) {
  return torch::equal(t, torch::full_like(t, value));
}

/// Runs `body` on two ranks. \return each rank's error; kNone when there is none.
std::vector<std::string> failures(const std::function<void(const Rank&)>& body) {
  return errors_of_ranks(2, body);
}
const std::vector<std::string> kNone(2, "");

}  // namespace

TEST_CASE("a gradient that the program keeps does not change", "[ranks][reducer][memory]") {
  const auto found = failures([](const Rank& self) {
    Pair pair(self);
    std::vector<at::Tensor> kept;
    for (int step = 1; step <= 4; ++step) {
      pair.step_from_none(step);
      // Keeps the tensor itself, or another one on its memory.
      kept.push_back(step % 2 == 0 ? pair.first.grad() : pair.first.grad().detach());
    }
    for (int step = 1; step <= 4; ++step) TORCH_CHECK(all_are(kept[step - 1], 1.5 * step), step);
    TORCH_CHECK(all_are(pair.second.grad(), 6));
  });
  CHECK(found == kNone);
}

TEST_CASE("gradients that were swapped stay swapped", "[ranks][reducer][memory]") {
  const auto found = failures([](const Rank& self) {
    const auto first = parameter({kLarge}), second = parameter({kLarge});
    Reducer reducer({{"first", first}, {"second", second}}, self.group);  // in one bucket
    const auto step = [&](double factor) {
      reduced_backward(
          reducer, [&] { return (first.sum() + 4 * second.sum()) * (factor * (self.rank + 1.0)); });
    };
    for (int i = 0; i < 3; ++i) {
      first.mutable_grad().reset();
      second.mutable_grad().reset();
      step(1);
    }
    std::swap(first.mutable_grad(), second.mutable_grad());
    step(10);
    TORCH_CHECK(all_are(first.grad(), 6 + 15), first.grad()[0]);
    TORCH_CHECK(all_are(second.grad(), 1.5 + 60), second.grad()[0]);
  });
  CHECK(found == kNone);
}

TEST_CASE("a gradient stays the same tensor while it accumulates", "[ranks][reducer][memory]") {
  const bool of_rebuilt = GENERATE(false, true);
  const auto found = failures([&](const Rank& self) {
    Pair pair(self);
    pair.step_from_none(1);
    if (of_rebuilt) pair.step_from_none(1);
    const auto gradient = pair.first.grad();
    const auto flat = gradient.view(-1);
    for (int step = 2; step <= 5; ++step) {
      pair.step(1);
      TORCH_CHECK(pair.first.grad().is_same(gradient), step);
      TORCH_CHECK(all_are(gradient, 1.5 + (step - 1) * 1.5), step, gradient);
      TORCH_CHECK(torch::equal(gradient, flat), step, ": a view of it has another value");
    }
  });
  CHECK(found == kNone);
}

TEST_CASE("optimizers may zero gradients in place", "[ranks][reducer][memory]") {
  const auto found = failures([](const Rank& self) {
    Pair pair(self);
    torch::optim::SGD optimizer({pair.first, pair.second}, 0.5);
    for (int step = 1; step <= 4; ++step) {
      optimizer.zero_grad(/*set_to_none=*/false);
      pair.step(1);
      optimizer.step();
      TORCH_CHECK(all_are(pair.first.grad(), 1.5) && all_are(pair.second.grad(), 1.5), step);
    }
    TORCH_CHECK(all_are(pair.first.detach(), 1 - 4 * 0.5 * 1.5));
  });
  CHECK(found == kNone);
}

TEST_CASE(
    "averages are written to gradients that the program allocated", "[ranks][reducer][memory]") {
  const auto found = failures([](const Rank& self) {
    Pair pair(self);
    const auto buffer = torch::zeros({2 * kLarge});
    pair.first.mutable_grad() = buffer.narrow(0, 0, kLarge);
    pair.second.mutable_grad() = buffer.narrow(0, kLarge, kLarge);
    for (int step = 1; step <= 4; ++step) {
      buffer.zero_();
      pair.step(step);
      TORCH_CHECK(all_are(buffer, 1.5 * step), step, buffer);
      TORCH_CHECK(pair.first.grad().const_data_ptr() == buffer.const_data_ptr(), step);
    }
  });
  CHECK(found == kNone);
}

TEST_CASE("during backward a gradient is this rank's own", "[ranks][reducer][memory]") {
  const bool set_to_none = GENERATE(false, true);
  const auto found = failures([&](const Rank& self) {
    Pair pair(self);
    std::vector<double> seen;
    std::vector<NodePtr> accumulators;
    for (const auto& p : pair.parameters) {
      accumulators.push_back(testing::after_gradient(p.tensor, [&seen, tensor = p.tensor] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        seen.push_back(tensor.grad()[0].item<double>());
      }));
    }
    for (int step = 1; step <= 6; ++step) {
      pair.zero(/*set_to_none=*/set_to_none || step <= 2);
      pair.step(step);
      TORCH_CHECK(seen == std::vector<double>(2, step * (self.rank + 1.0)), step, ": ", seen);
      seen.clear();
      TORCH_CHECK(all_are(pair.second.grad(), 1.5 * step), step);
    }
  });
  CHECK(found == kNone);
}

TEST_CASE("two gradients that share memory are averaged once each", "[ranks][reducer][memory]") {
  const auto found = failures([](const Rank& self) {
    const auto row = parameter({kLarge});
    const auto column = parameter({kLarge, 1});
    Reducer reducer({{"row", row}, {"column", column}}, self.group);
    for (int step = 1; step <= 4; ++step) {
      row.mutable_grad().reset();
      column.mutable_grad().reset();
      reduced_backward(
          reducer, [&] { return (row + column.view(-1)).sum() * (step * (self.rank + 1.0)); });
      TORCH_CHECK(all_are(row.grad(), 1.5 * step) && all_are(column.grad(), 1.5 * step), step);
    }
  });
  CHECK(found == kNone);
}

TEST_CASE("two reducers average the same gradient in one pass", "[ranks][reducer][memory]") {
  const bool set_to_none = GENERATE(false, true);
  const auto found = failures([&](const Rank& self) {
    Pair pair(self);
    Reducer other(pair.parameters, self.group, ReducerOptions().bucket_cap_mb(1e-6));
    for (int step = 1; step <= 6; ++step) {
      pair.zero(/*set_to_none=*/set_to_none || step <= 2);
      other.prepare_for_forward();
      other.prepare_for_backward();
      pair.step(step);
      TORCH_CHECK(all_are(pair.first.grad(), 1.5 * step), step, pair.first.grad());
    }
  });
  CHECK(found == kNone);
}

TEST_CASE("a large gradient is averaged in place", "[ranks][reducer][memory]") {
  const bool set_to_none = GENERATE(true, false);
  const auto found = failures([&](const Rank& self) {
    const auto memory = gradient_memory_of(*self.group, at::kCPU);
    if (!memory) return;  // a backend that has none
    Pair pair(self);
    for (int step = 1; step <= 5; ++step) {
      if (step == 1 || set_to_none) pair.zero(/*set_to_none=*/true);
      const void* made = nullptr;
      const auto hook = pair.first.register_hook(
          [&](const at::Tensor& incoming) { made = incoming.const_data_ptr(); });
      // Autograd allocates these gradients; those of a sum alone are one number, expanded.
      const auto factor = torch::full({kLarge}, self.rank + 1.0);
      reduced_backward(
          pair.reducer, [&] { return (pair.first * factor + pair.second * factor).sum(); });
      pair.first.remove_hook(hook);
      for (const auto& p : {pair.first, pair.second}) {
        const auto& grad = p.grad();
        TORCH_CHECK(memory->contains(grad), step);
        TORCH_CHECK(grad.storage().nbytes() == grad.nbytes(), step, ": shares a storage");
        // The thread that completed the collective releases its reference a little later.
        for (int i = 0; i < 500 && grad.storage().use_count() > 1; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        TORCH_CHECK(grad.storage().use_count() == 1, step, ": is shared");
        TORCH_CHECK(all_are(grad, set_to_none ? 1.5 : 1.5 * step), step, grad[0]);
      }
      const bool is_new = step == 1 || set_to_none;
      TORCH_CHECK((pair.first.grad().const_data_ptr() == made) == is_new, step, ": was copied");
    }
  });
  CHECK(found == kNone);
}

TEST_CASE("a gradient whose memory autograd still reads is copied", "[ranks][reducer][memory]") {
  const auto found = failures([](const Rank& self) {
    const auto early = parameter({kLarge}), late = parameter({kLarge});
    Reducer reducer(
        {{"late", late}, {"early", early}}, self.group, ReducerOptions().bucket_cap_mb(1e-6));
    for (int step = 1; step <= 4; ++step) {
      early.mutable_grad().reset();
      late.mutable_grad().reset();
      reduced_backward(reducer, [&] {
        // Autograd passes the same gradient to `early`, as a view, and through many nodes to
        // `late`.
        auto way = late.view({kLarge});
        for (int i = 0; i < 20; ++i) way = way * 1.0;
        return ((early.view({2, -1}).view({-1}) + way) * (step * (self.rank + 1.0))).sum();
      });
      TORCH_CHECK(all_are(early.grad(), 1.5 * step), step, early.grad()[0]);
      TORCH_CHECK(all_are(late.grad(), 1.5 * step), step, late.grad()[0]);
    }
  });
  CHECK(found == kNone);
}

TEST_CASE("locally accumulated gradients are averaged once", "[ranks][reducer][memory]") {
  const auto found = failures([](const Rank& self) {
    Pair pair(self);
    for (int step = 1; step <= 4; ++step) {
      pair.zero(/*set_to_none=*/true);
      pair.reducer.prepare_for_local_backward();
      (pair.first.sum() + pair.second.sum()).backward();
      pair.step(step);
      TORCH_CHECK(all_are(pair.first.grad(), 1 + 1.5 * step), step, pair.first.grad()[0]);
    }
  });
  CHECK(found == kNone);
}

TEST_CASE("a gradient that the program replaced is averaged", "[ranks][reducer][memory]") {
  const auto found = failures([](const Rank& self) {
    Pair pair(self);
    for (int step = 1; step <= 4; ++step) {
      pair.zero(/*set_to_none=*/true);
      reduced_backward(pair.reducer, [&] {
        const auto loss = (pair.first.sum() + pair.second.sum()) * (self.rank + 1.0);
        return loss;
      });
      const auto before = pair.first.grad();
      pair.first.mutable_grad() = pair.first.grad().clone();
      pair.step(1);
      TORCH_CHECK(all_are(pair.first.grad(), 3), step, pair.first.grad()[0]);
      TORCH_CHECK(all_are(before, 1.5), step, before[0]);
    }
  });
  CHECK(found == kNone);
}

TEST_CASE("a kept gradient does not change beside an empty parameter", "[ranks][reducer][memory]") {
  const auto found = failures([](const Rank& self) {
    const auto w = parameter({kLarge}), empty = parameter({0});
    Reducer reducer({{"w", w}, {"empty", empty}}, self.group);
    std::vector<at::Tensor> kept;
    for (int step = 1; step <= 5; ++step) {
      for (const auto& p : {w, empty}) p.mutable_grad().reset();
      reduced_backward(
          reducer, [&] { return (w.sum() + empty.sum()) * (step * (self.rank + 1.0)); });
      kept.push_back(w.grad());
    }
    for (int step = 1; step <= 5; ++step) TORCH_CHECK(all_are(kept[step - 1], 1.5 * step), step);
  });
  CHECK(found == kNone);
}

TEST_CASE("averages are written to memory that is not torch's", "[ranks][reducer][memory]") {
  const auto found = failures([](const Rank& self) {
    Pair pair(self);
    std::vector<float> memory(kLarge);
    pair.zero(/*set_to_none=*/true);
    pair.first.mutable_grad() = at::from_blob(memory.data(), {kLarge});
    for (int step = 1; step <= 4; ++step) {
      std::fill(memory.begin(), memory.end(), 0.0F);
      pair.second.mutable_grad().reset();
      pair.step(step);
      TORCH_CHECK(memory == std::vector<float>(kLarge, 1.5F * step), step, ": ", memory[0]);
    }
  });
  CHECK(found == kNone);
}

TEST_CASE("a hook may keep and overwrite its buffers", "[ranks][reducer][memory]") {
  const auto found = failures([](const Rank& self) {
    Pair pair(self);
    std::vector<at::Tensor> buffers;
    pair.reducer.register_comm_hook([&](GradBucket& bucket) {
      buffers.push_back(bucket.buffer());
      return hooks::all_reduce(self.group)(bucket);
    });
    for (int step = 1; step <= 4; ++step) {
      pair.step_from_none(step);
      for (const auto& buffer : buffers) buffer.zero_();
      TORCH_CHECK(all_are(pair.first.grad(), 1.5 * step), step, pair.first.grad());
    }
  });
  CHECK(found == kNone);
}

TEST_CASE("a gradient outlives its reducer and its group", "[ranks][reducer][memory]") {
  const auto gradients = run_ranks<at::Tensor>(2, [](const Rank& self) {
    Pair pair(self);
    pair.step_from_none(2);
    return pair.first.grad();
  });
  CHECK(all_are(gradients[0], 3));
  CHECK(all_are(gradients[1], 3));
}

}  // namespace ddp
