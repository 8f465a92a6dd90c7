// Joins in which one rank leaves out a collective of the others: every rank throws the reason, and
// no collectives of different sizes are matched, which would end the process over Gloo.
#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/one_weight.h"
#include "ddp/wrapping.h"
#include "support/ranks.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

using Model = DistributedDataParallel<torch::nn::Linear>;

// Sums five numbers over the ranks in each iteration.
class Summing : public Joinable {
 public:
  explicit Summing(ProcessGroup group) : group_(std::move(group)) {}

  void iterate() {
    notify_join(*this);
    add();
  }
  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override {
    class Hook : public JoinHook {
     public:
      explicit Hook(Summing& summing) : summing_(summing) {}
      void main_hook() override { summing_.add(); }

     private:
      Summing& summing_;
    };
    return std::make_unique<Hook>(*this);
  }
  c10::Device join_device() const override { return at::kCPU; }
  ProcessGroup join_process_group() const override { return group_; }

 private:
  void add() {
    std::vector<at::Tensor> sum{torch::ones({5})};
    group_->allreduce(sum)->wait();
  }

  ProcessGroup group_;
};

void skip_batch(Model& model) { model->forward(torch::ones({1, 1})); }

/// The errors of three ranks in a join of `first`, `summing` and `second`.
std::vector<TimedError> errors_in_join(
    const std::vector<int>& order,
    const std::function<void(const Rank&, Model&, Summing&, Model&)>& body,
    const JoinOptions& options = {}) {
  return run_ranks<TimedError>(3, kLongTimeout, [&](const Rank& self) {
    Model first(make_linear(), in(self)), second(make_linear(), in(self));
    Summing summing(self.group);
    const std::vector<Joinable*> all{first.get(), &summing, second.get()};
    std::vector<Joinable*> joinables;
    for (const int i : order) joinables.push_back(all[i]);
    return timed_error_of([&] {
      join(
          joinables, [&] { body(self, first, summing, second); }, options);
    });
  });
}

void check_reason(const std::vector<TimedError>& seen, const std::string& reason) {
  for (const auto& rank : seen) {
    CHECK_THAT(rank.error, ContainsText(reason) && ContainsText("torch::NoGradGuard"));
    CHECK(rank.seconds < 10);
  }
}

const std::string kPlaces = "expected all ranks at the same place of an iteration, got ";

}  // namespace

TEST_CASE("a backward left out between two models is an error", "[ranks][errors][join][many]") {
  const auto seen = errors_in_join({0, 2}, [](const Rank& self, auto& first, auto&, auto& second) {
    for (int i = 0; i < 3; ++i) {
      self.rank == 1 && i == 1 ? skip_batch(first) : void(step(first, 1));
      step(second, 1);
    }
  });
  check_reason(
      seen, kPlaces +
                "the backward pass of object 0 on ranks 0, 2, the backward pass of object 1 on "
                "rank 1 of 3");
}

TEST_CASE("a backward left out after two models is an error", "[ranks][errors][join][many]") {
  const bool has_ended_rank = GENERATE(false, true);
  CAPTURE(has_ended_rank);
  const auto seen = errors_in_join({0, 2}, [&](const Rank& self, auto& first, auto&, auto& second) {
    if (has_ended_rank && self.rank == 0) return;
    for (int i = 0; i < 4; ++i) {
      step(first, 1);
      self.rank == 1 && i == 1 ? skip_batch(second) : void(step(second, 1));
    }
  });
  check_reason(
      seen, kPlaces +
                "the backward pass of object 0 on rank 1, the backward pass of object 1 on rank" +
                (has_ended_rank ? " 2 of 3" : "s 0, 2 of 3"));
}

TEST_CASE("a backward left out where the input ends counts as zeros", "[ranks][join][many]") {
  const auto gradients = run_ranks<std::vector<float>>(3, [](const Rank& self) {
    Model first(make_linear(), in(self)), second(make_linear(), in(self));
    std::vector<float> seen;
    join({first.get(), second.get()}, [&] {
      for (int i = 0; i < 3; ++i) {
        step(first, 1);
        if (self.rank == 1 && i == 1) return skip_batch(second);
        seen.push_back(step(second, 3));
      }
    });
    return seen;
  });
  for (const int rank : {0, 2}) CHECK(gradients[rank] == std::vector<float>{3, 2, 2});
}

TEST_CASE("a model left out of an iteration is an error", "[ranks][errors][join][many]") {
  const auto seen = errors_in_join({0, 2}, [](const Rank& self, auto& first, auto&, auto& second) {
    for (int i = 0; i < 3; ++i) {
      if (self.rank != 1 || i != 1) step(first, 1);
      step(second, 1);
    }
  });
  check_reason(
      seen, kPlaces +
                "the backward pass of object 0 on ranks 0, 2, the backward pass of object 1 on "
                "rank 1 of 3");
}

TEST_CASE(
    "a backward left out before or after an object of the user's own is an error",
    "[ranks][errors][join][many]") {
  const bool model_first = GENERATE(false, true);
  CAPTURE(model_first);
  const auto order = model_first ? std::vector<int>{0, 1} : std::vector<int>{1, 0};
  const auto seen = errors_in_join(order, [&](const Rank& self, auto& model, auto& own, auto&) {
    for (int i = 0; i < 3; ++i) {
      if (!model_first) own.iterate();
      self.rank == 1 && i == 1 ? skip_batch(model) : void(step(model, 1));
      if (model_first) own.iterate();
    }
  });
  check_reason(
      seen, kPlaces + (model_first ? "an iteration of object 1 on rank 1, the backward pass of "
                                     "object 0 on ranks 0, 2 of 3"
                                   : "an iteration of object 0 on rank 1, the backward pass of "
                                     "object 1 on ranks 0, 2 of 3"));
}

TEST_CASE("a backward left out before early termination is an error", "[ranks][errors][join]") {
  const bool is_last = GENERATE(false, true);
  CAPTURE(is_last);
  const auto seen = errors_in_join(
      {0},
      [&](const Rank& self, auto& model, auto&, auto&) {
        for (int i = 0; i < 3; ++i) {
          self.rank == 1 && i == 1 ? skip_batch(model) : void(step(model, 1));
          if (self.rank == 1 && i == 1 && is_last) return;
        }
      },
      JoinOptions().throw_on_early_termination(true));
  check_reason(
      seen, kPlaces + "the backward pass of object 0 on ranks 0, 2, the " +
                (is_last ? "end of the input" : "forward pass of object 0") + " on rank 1 of 3");
}

TEST_CASE("two forwards before a backward are one pass if all ranks do so", "[ranks][join]") {
  const bool early = GENERATE(false, true);
  const auto gradients = run_ranks<std::vector<float>>(2, [&](const Rank& self) {
    Model first(make_linear(), in(self)), second(make_linear(), in(self));
    std::vector<Joinable*> joinables{first.get()};
    if (!early) joinables.push_back(second.get());
    std::vector<float> seen;
    join(
        joinables,
        [&] {
          for (int i = 0; i < 2; ++i) {
            first->zero_grad();
            skip_batch(first);
            const auto x = torch::full({1, 1}, self.rank + 1.0);
            (first->forward(x) + first->forward(x)).sum().backward();
            seen.push_back(first->module()->weight.grad().item<float>());
            if (!early) seen.push_back(step(second, 2 * self.rank));
          }
        },
        JoinOptions().throw_on_early_termination(early));
    return seen;
  });
  const auto expected = early ? std::vector<float>{3, 3} : std::vector<float>{3, 1, 3, 1};
  for (const auto& seen : gradients) CHECK(seen == expected);
}

TEST_CASE(
    "a metric under NoGradGuard need not match where several objects join", "[ranks][join][many]") {
  const auto seen =
      errors_in_join({0, 1, 2}, [](const Rank& self, auto& first, auto& summing, auto& second) {
        for (int i = 0; i < 1 + self.rank; ++i) {
          step(first, 1);
          {
            const torch::NoGradGuard no_grad;
            for (int metric = 0; metric < self.rank; ++metric) skip_batch(first);
          }
          summing.iterate();
          step(second, 1);
        }
      });
  for (const auto& rank : seen) CHECK(rank.error.empty());
}

TEST_CASE("a rank warns once where it joins more iterations than it had", "[ranks][join]") {
  const bool is_much = GENERATE(false, true);
  const int own = is_much ? 10 : 1100;
  const auto counts = run_ranks<std::vector<int>>(2, [&](const Rank& self) {
    const WarnAlways always;
    const Warnings warnings;
    Summing summing(self.group);
    join({&summing}, [&] {
      for (int i = 0; i < own + (self.rank == 0 ? 1050 : 0); ++i) summing.iterate();
    });
    return std::vector<int>{
        warnings.count("has taken part in 1000 iterations of other ranks since its own input "
                       "ended, after 10 of its own"),
        static_cast<int>(warnings.texts.size())};
  });
  CHECK(counts[0] == std::vector<int>{0, 0});
  CHECK(counts[1] == std::vector<int>{is_much, is_much});
}

}  // namespace ddp
