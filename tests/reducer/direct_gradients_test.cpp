// Large gradients, which are not packed where the group has memory for them: a program may use them
// like any others. The same must hold over other backends.
#include <atomic>
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

constexpr int64_t kWide = 32768;

/// Runs `body` on two ranks. \return each rank's error; "" for none.
std::vector<std::string> errors_of_two(const std::function<void(const Rank&)>& body) {
  return errors_of_ranks(2, body);
}
const std::vector<std::string> kNothing(2, "");

/// Whether `grad` lies where it can be reduced in place; true where the group has no such memory.
bool is_in_place(const Rank& self, const at::Tensor& grad) {
  const auto memory = gradient_memory_of(*self.group, at::kCPU);
  return !memory || memory->contains(grad);
}

bool holds(const at::Tensor& t, double value) {
  return torch::equal(t, torch::full_like(t, value));
}

/// A loss whose gradient autograd makes as a tensor of its own: `value`.
at::Tensor loss_of(const at::Tensor& p, double value) {
  return (p * torch::full_like(p, value)).sum();
}

}  // namespace

TEST_CASE("two models average in separate and in shared passes", "[ranks][reducer][direct]") {
  const auto found = errors_of_two([](const Rank& self) {
    const auto a = parameter({kWide}), b = parameter({kWide});
    Reducer of_a({{"a", a}}, self.group), of_b({{"b", b}}, self.group);
    for (int step = 1; step <= 4; ++step) {
      a.mutable_grad().reset();
      b.mutable_grad().reset();
      const double mine = step * (self.rank + 1.0);
      if (step % 2 == 0) {
        reduced_backward(of_a, [&] { return loss_of(a, mine); });
        reduced_backward(of_b, [&] { return loss_of(b, 2 * mine); });
      } else {
        of_a.prepare_for_forward();
        of_b.prepare_for_forward();
        const auto loss = loss_of(a, mine) + loss_of(b, 2 * mine);
        of_a.prepare_for_backward({{loss}, true});
        of_b.prepare_for_backward({{loss}, true});
        loss.backward();
      }
      TORCH_CHECK(holds(a.grad(), 1.5 * step) && holds(b.grad(), 3 * step), step);
      TORCH_CHECK(is_in_place(self, a.grad()) && is_in_place(self, b.grad()), step);
    }
  });
  CHECK(found == kNothing);
}

TEST_CASE("a model may change its group", "[ranks][reducer][direct]") {
  // The second reducer gets a gradient in the first one's memory, as on another group of the ranks.
  const auto found = errors_of_two([](const Rank& self) {
    const auto a = parameter({kWide});
    auto first = std::make_unique<Reducer>(std::vector<NamedParameter>{{"a", a}}, self.group);
    reduced_backward(*first, [&] { return loss_of(a, self.rank + 1.0); });
    const auto kept = a.grad();
    first.reset();
    Reducer second({{"a", a}}, self.group);
    reduced_backward(second, [&] { return loss_of(a, self.rank + 1.0); });
    TORCH_CHECK(holds(a.grad(), 3) && holds(kept, 3));
    a.mutable_grad().reset();
    reduced_backward(second, [&] { return loss_of(a, self.rank + 1.0); });
    TORCH_CHECK(holds(a.grad(), 1.5) && holds(kept, 3));
  });
  CHECK(found == kNothing);
}

TEST_CASE("other threads may allocate equally large tensors", "[ranks][reducer][direct]") {
  const auto found = errors_of_two([](const Rank& self) {
    const auto memory = gradient_memory_of(*self.group, at::kCPU);
    const auto a = parameter({kWide});
    Reducer reducer({{"a", a}}, self.group);
    std::atomic<bool> done{false};
    std::atomic<int> wrong{0}, made{0};
    std::thread loader([&] {
      std::vector<at::Tensor> batches(4);
      for (int i = 0; !done || i < 8; ++i) {
        auto& batch = batches[static_cast<size_t>(i % 4)];
        if (batch.defined() && !holds(batch, i - 4)) ++wrong;
        batch = torch::full({kWide}, static_cast<double>(i));
        if (memory && memory->contains(batch)) ++wrong;
        ++made;
      }
    });
    for (int step = 1; step <= 50; ++step) {
      a.mutable_grad().reset();
      reduced_backward(reducer, [&] { return loss_of(a, step * (self.rank + 1.0)); });
      if (!holds(a.grad(), 1.5 * step)) ++wrong;
    }
    done = true;
    loader.join();
    TORCH_CHECK(wrong == 0 && made > 0);
  });
  CHECK(found == kNothing);
}

TEST_CASE("large gradients keep their parameters' layouts and types", "[ranks][reducer][direct]") {
  const auto found = errors_of_two([](const Rank& self) {
    const auto image = torch::ones({64, 16, 8, 8})
                           .contiguous(at::MemoryFormat::ChannelsLast)
                           .set_requires_grad(true);
    const auto turned = torch::ones({256, 128}).t().set_requires_grad(true);
    const auto fine = parameter({kWide}, at::kDouble);
    const auto coarse = parameter({kWide}, at::kBFloat16);
    const std::vector<at::Tensor> all{image, turned, fine, coarse};
    Reducer reducer(
        {{"image", image}, {"turned", turned}, {"fine", fine}, {"coarse", coarse}}, self.group);
    for (int step = 1; step <= 3; ++step) {
      for (const auto& p : all) p.mutable_grad().reset();
      const double mine = step * (self.rank + 1.0);
      reduced_backward(reducer, [&] {
        at::Tensor loss = torch::zeros({});
        for (const auto& p : all) loss = loss + loss_of(p, mine).to(at::kFloat);
        return loss;
      });
      for (const auto& p : all) {
        TORCH_CHECK(holds(p.grad(), 1.5 * step), step, " ", p.scalar_type());
        TORCH_CHECK(p.grad().strides() == p.strides() && p.grad().dtype() == p.dtype(), step);
      }
    }
  });
  CHECK(found == kNothing);
}

TEST_CASE("gradients may lie in different memories on the ranks", "[ranks][reducer][direct]") {
  const auto found = errors_of_two([](const Rank& self) {
    const auto a = parameter({kWide}), b = parameter({kWide});
    Reducer reducer({{"a", a}, {"b", b}}, self.group);
    for (int step = 1; step <= 4; ++step) {
      b.mutable_grad().reset();
      // On one rank the gradient is the program's own tensor, as where the group's memory is full.
      const bool own = (step + self.rank) % 2 == 0;
      a.mutable_grad() = own ? torch::zeros({kWide}) : at::Tensor();
      reduced_backward(reducer, [&] {
        return loss_of(a, step * (self.rank + 1.0)) + loss_of(b, self.rank + 1.0);
      });
      TORCH_CHECK(holds(a.grad(), 1.5 * step) && holds(b.grad(), 1.5), step);
      TORCH_CHECK(own || is_in_place(self, a.grad()), step);
    }
  });
  CHECK(found == kNothing);
}

TEST_CASE("the pass after one that failed averages gradients", "[ranks][reducer][direct]") {
  const auto found = errors_of_two([](const Rank& self) {
    const auto a = parameter({kWide}), b = parameter({kWide});
    Reducer reducer({{"a", a}, {"b", b}}, self.group);
    const double mine = self.rank + 1.0;
    for (int step = 1; step <= 3; ++step) {
      const auto both = [&] { return loss_of(a, mine) + loss_of(b, mine); };
      reduced_backward(reducer, both);
      bool failed = false;
      try {
        reduced_backward(reducer, [&] { return self.rank == 0 ? loss_of(a, mine) : both(); });
      } catch (const std::exception&) {
        failed = true;
      }
      TORCH_CHECK(failed, "b got no gradient on rank 0");
      a.mutable_grad().zero_();
      b.mutable_grad().zero_();
      reduced_backward(reducer, both);
      TORCH_CHECK(holds(a.grad(), 1.5) && holds(b.grad(), 1.5), step, " ", a.grad()[0]);
      a.mutable_grad().reset();
      b.mutable_grad().reset();
    }
  });
  CHECK(found == kNothing);
}

TEST_CASE("a sparse gradient may be the last one to be ready", "[ranks][reducer][direct]") {
  const auto found = errors_of_two([](const Rank& self) {
    const auto table = parameter({8, 4}), a = parameter({kWide}), last = parameter({kWide});
    // The sparse bucket goes first, although its gradient comes after a's.
    Reducer reducer(
        {{"last", last}, {"a", a}, {"table", table, /*expect_sparse=*/true}}, self.group,
        ReducerOptions().bucket_cap_mb(1e-6).find_unused_parameters(true));
    for (int step = 1; step <= 3; ++step) {
      for (const auto& p : {table, a, last}) p.mutable_grad().reset();
      const double mine = step * (self.rank + 1.0);
      reduced_backward(reducer, [&] {
        const auto rows = torch::embedding(
            table, torch::tensor({1, 2}, torch::kLong), /*padding_idx=*/-1,
            /*scale_grad_by_freq=*/false, /*sparse=*/true);
        const auto late = (last * torch::full({kWide}, mine)).sum();
        const auto middle = rows.sum() * mine + late * 1.0;
        return loss_of(a, mine) + middle;  // a's gradient is ready before the others'
      });
      TORCH_CHECK(holds(a.grad(), 1.5 * step) && holds(last.grad(), 1.5 * step), step);
      TORCH_CHECK(table.grad().to_dense()[1][0].item<double>() == 1.5 * step, step);
    }
  });
  CHECK(found == kNothing);
}

TEST_CASE("with create_graph a gradient keeps its graph", "[ranks][reducer][direct]") {
  const auto found = errors_of_two([](const Rank& self) {
    const auto a = parameter({kWide});
    Reducer reducer({{"a", a}}, self.group);
    for (int step = 1; step <= 3; ++step) {
      a.mutable_grad().reset();
      reducer.prepare_for_forward();
      const auto loss = (a * a * torch::full({kWide}, self.rank + 1.0)).sum();
      reducer.prepare_for_backward({{loss}, true});
      loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      TORCH_CHECK(a.grad().requires_grad());
      TORCH_CHECK(holds(a.grad().detach(), 3), a.grad().detach()[0]);
      a.mutable_grad().reset();  // breaks the reference cycle
    }
  });
  CHECK(found == kNothing);
}

}  // namespace ddp
