#include <ddp/distributed_data_parallel.h>
#include <ddp/sampler.h>
#include <torch/torch.h>

#include "ddp/one_weight.h"
#include "ddp/wrapping.h"
#include "support/ranks.h"
#include "support/recording_backend.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

// Counts iterations over all ranks with an all-reduce in each.
class Counter : public Joinable {
 public:
  explicit Counter(ProcessGroup group) : group_(std::move(group)) {}

  void iterate() {
    notify_join(*this);
    add(1);
  }
  double total() const { return total_; }
  int shadowed() const { return shadowed_; }
  bool was_last() const { return was_last_; }

  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override {
    class Hook : public JoinHook {
     public:
      explicit Hook(Counter& counter) : counter_(counter) {}
      void main_hook() override {
        counter_.add(0);
        ++counter_.shadowed_;
      }
      void post_hook(bool is_last_joiner) override { counter_.was_last_ = is_last_joiner; }

     private:
      Counter& counter_;
    };
    return std::make_unique<Hook>(*this);
  }
  c10::Device join_device() const override { return at::kCPU; }
  ProcessGroup join_process_group() const override { return group_; }

 private:
  void add(double amount) {
    std::vector<at::Tensor> sum{torch::full({1}, amount)};
    group_->allreduce(sum)->wait();
    total_ += sum[0].item<double>();
  }

  ProcessGroup group_;
  double total_ = 0;
  int shadowed_ = 0;
  bool was_last_ = false;
};

}  // namespace

TEST_CASE("a body may drop the last handle of its wrapper", "[join][ranks]") {
  const auto gradients = run_ranks<double>(2, [](const Rank& self) {
    auto net = make_linear();
    DistributedDataParallel model(net, in(self));
    model->join([&] {
      for (int i = 0; i <= self.rank; ++i) {
        net->zero_grad();
        model->forward(torch::ones({1, 1})).sum().backward();
      }
      model = nullptr;
    });
    return net->weight.grad().item<double>();
  });
  CHECK(gradients[1] > 0);
}

TEST_CASE("a rank whose input ended contributes zeros", "[ranks][join]") {
  const bool initial = GENERATE(true, false);
  const auto seen = run_ranks<std::vector<float>>(2, [&](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self));
    std::vector<float> gradients;
    model->join(
        [&] {
          for (int i = 0; i < 2 + 3 * self.rank; ++i) gradients.push_back(step(model, 4));
        },
        JoinOptions().divide_by_initial_world_size(initial));
    gradients.push_back(step(model, 2 + 2 * self.rank));  // after the join, as usual
    return gradients;
  });
  CHECK(seen[0] == std::vector<float>{4, 4, 3});
  const float alone = initial ? 2 : 4;
  CHECK(seen[1] == std::vector<float>{4, 4, alone, alone, alone, 3});
}

TEST_CASE("any rank, also rank 0, may have no input at all in an epoch", "[ranks][join][many]") {
  const int mode = GENERATE(0, 1, 2);
  const auto seen = run_ranks<std::vector<float>>(3, [&](const Rank& self) {
    auto net = make_linear();
    DistributedDataParallel model(
        net, in(self).find_unused_parameters(mode == 1).static_graph(mode == 2));
    std::vector<float> seen;
    for (int epoch = 0; epoch < 3; ++epoch) {
      // Another rank has no input in each epoch.
      const int inputs = (self.rank + 3 - epoch) % 3;
      model->join([&] {
        for (int i = 0; i < inputs; ++i) {
          step(model, 3);
          const torch::NoGradGuard no_grad;
          net->weight.sub_(net->weight.grad());
        }
      });
      seen.push_back(net->weight.item<float>());
    }
    seen.push_back(step(model, 1 + self.rank));
    return seen;
  });
  // Two ranks have input in the first iteration (2), one in the second (1).
  for (const auto& values : seen) CHECK(values == std::vector<float>{-2, -5, -8, 2});
}

TEST_CASE(
    "early termination throws on every rank, and the model stays usable", "[ranks][join][many]") {
  const auto seen = run_ranks<std::vector<std::string>>(3, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self));
    int steps = 0;
    const auto error = error_of([&] {
      model->join(
          [&] {
            for (int i = 0; i < 2 + self.rank; ++i, ++steps) step(model, 1);
          },
          JoinOptions().throw_on_early_termination(true));
    });
    const auto even = error_of([&] {
      model->join([&] { step(model, 1); }, JoinOptions().throw_on_early_termination(true));
    });
    return std::vector<std::string>{error, std::to_string(steps), even};
  });
  const std::string others =
      "Detected at least one rank that exhausted inputs. Throwing across all ranks.";
  CHECK(seen[0] == std::vector<std::string>{"Rank 0 exhausted all inputs.", "2", ""});
  CHECK(seen[1] == std::vector<std::string>{others, "2", ""});
  CHECK(seen[2] == std::vector<std::string>{others, "2", ""});
}

TEST_CASE("early termination works for modules that communicate in forward", "[ranks][join]") {
  class Communicating : public torch::nn::Module {
   public:
    explicit Communicating(ProcessGroup group) : group_(std::move(group)) {
      w = register_parameter("w", torch::ones({1}));
    }
    at::Tensor forward(const at::Tensor& x) {
      std::vector<at::Tensor> sum{x.clone()};
      group_->allreduce(sum)->wait();
      return w * sum[0];
    }
    at::Tensor w;

   private:
    ProcessGroup group_;
  };
  const auto errors = errors_of_ranks(2, kLongTimeout, [](const Rank& self) {
    DistributedDataParallel model(std::make_shared<Communicating>(self.group), in(self));
    model->join(
        [&] {
          for (int i = 0; i < 1 + 2 * self.rank; ++i) {
            model->forward(torch::ones({1})).sum().backward();
          }
        },
        JoinOptions().throw_on_early_termination(true));
  });
  CHECK_THAT(errors[0], ContainsText("Rank 0 exhausted all inputs"));
  CHECK_THAT(errors[1], ContainsText("at least one rank that exhausted inputs"));
}

TEST_CASE("enable(false) runs the body alone", "[ranks][join]") {
  const auto seen = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self));
    std::vector<float> gradients;
    model->join(
        [&] {
          for (int i = 0; i < 3; ++i) gradients.push_back(step(model, 2 + 2 * self.rank));
        },
        JoinOptions().enable(false).divide_by_initial_world_size(false));
    return gradients;
  });
  for (const auto& gradients : seen) CHECK(gradients == std::vector<float>{3, 3, 3});
}

TEST_CASE(
    "an exception in the body is passed on, and stops the others", "[ranks][errors][join][many]") {
  const auto seen = run_ranks<TimedError>(3, kLongTimeout, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self));
    return timed_error_of([&] {
      model->join([&] {
        for (int i = 0; i < 2 + self.rank; ++i) {
          // Rank 0's input has ended, rank 2 continues.
          if (self.rank == 1 && i == 2) throw std::runtime_error("no such file");
          step(model, 1);
        }
      });
    });
  });
  CHECK(seen[1].error == "no such file");
  for (const int rank : {0, 2}) {
    CHECK_THAT(seen[rank].error, ContainsText("join's body threw on rank 1 of 3: no such file"));
    CHECK(seen[rank].seconds < 5);
  }
}

TEST_CASE("a failure reaches a model that joins after another class", "[ranks][errors][join]") {
  const auto seen = run_ranks<double>(2, kLongTimeout, [](const Rank& self) {
    Counter counter(self.group);
    DistributedDataParallel model(make_linear(), in(self));
    const auto seen = timed_error_of([&] {
      join({&counter, model.get()}, [&] {
        for (int i = 0; i < 3; ++i) {
          if (self.rank == 1 && i == 2) throw std::runtime_error("no such file");
          counter.iterate();
          step(model, 1);
        }
      });
    });
    TORCH_CHECK(seen.error.find("no such file") != std::string::npos, seen.error);
    return seen.seconds;
  });
  for (const double seconds : seen) CHECK(seconds < 5);
}

TEST_CASE("an error on all ranks leaves the models usable", "[ranks][errors][join]") {
  struct TwoLayers : torch::nn::Module {
    torch::nn::Linear first{nullptr}, second{nullptr};
    TwoLayers() {
      first = register_module("first", torch::nn::Linear(1, 1));
      second = register_module("second", torch::nn::Linear(1, 1));
    }
    torch::Tensor forward(const torch::Tensor& x, bool both) {
      return both ? second(first(x)) : first(x);
    }
  };
  const auto errors = run_ranks<std::string>(2, kLongTimeout, [](const Rank& self) {
    DistributedDataParallel model(std::make_shared<TwoLayers>(), in(self));
    const auto run = [&](bool both) { model->forward(torch::ones({1, 1}), both).sum().backward(); };
    const auto error = error_of([&] {
      model->join([&] {
        for (int i = 0; i < 1 + self.rank; ++i) run(/*both=*/i == 0);
      });
    });
    run(/*both=*/true);
    return error;
  });
  for (const auto& error : errors) CHECK_THAT(error, ContainsText("second.weight"));
}

TEST_CASE("an evaluation in a join uses one model, and each sample once", "[ranks][join][many]") {
  constexpr size_t kSamples = 7;
  const auto outputs = run_ranks<double>(3, [](const Rank& self) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(1));
    DistributedDataParallel model(net, in(self));
    // The ranks' statistics differ after these forward passes.
    for (int i = 0; i < 2; ++i) {
      model->forward(torch::tensor({{1.0f}, {3.0f}}) * (self.rank + 1)).sum().backward();
    }
    DistributedEvalSampler sampler(
        kSamples, DistributedEvalSamplerOptions().rank(self.rank).num_replicas(self.size));
    auto sum = torch::zeros({1}, torch::kDouble);
    const auto rank0_mean = net[0]->as<torch::nn::BatchNorm1d>()->running_mean.clone();
    model->join([&] {
      const torch::NoGradGuard no_grad;
      model->eval();
      while (const auto batch = sampler.next(2)) {
        for (const size_t index : *batch) {
          sum += model->forward(torch::full({1, 1}, static_cast<float>(index))).sum();
        }
      }
    });
    std::vector<torch::Tensor> total{sum};
    self.group->allreduce(total)->wait();
    // The output of one process with rank 0's statistics for all samples.
    std::vector<torch::Tensor> mean{rank0_mean};
    self.group->broadcast(mean)->wait();
    const auto& norm = net[0]->as<torch::nn::BatchNorm1d>();
    auto all = torch::arange(static_cast<int64_t>(kSamples), torch::kFloat).view({-1, 1});
    const auto expected = torch::batch_norm(
        all, norm->weight, norm->bias, mean[0], norm->running_var, false, 0.1, 1e-5, false);
    return std::abs(total[0].item<double>() - expected.sum().item<double>());
  });
  for (const double difference : outputs) CHECK(difference < 1e-4);
}

TEST_CASE(
    "buckets are rebuilt in the order of a rank that still has input", "[ranks][join][many]") {
  // `last` is registered first but used last, so its gradient is ready first.
  struct Reversed : torch::nn::Module {
    torch::nn::Linear last{nullptr}, first{nullptr};
    Reversed() {
      const auto options = torch::nn::LinearOptions(64, 64).bias(false);
      last = register_module("last", torch::nn::Linear(options));
      first = register_module("first", torch::nn::Linear(options));
    }
    torch::Tensor forward(const torch::Tensor& x) { return last(first(x)); }
  };
  struct Seen {
    std::vector<std::vector<size_t>> buckets;
    bool rebuilt;
    bool rebuilt_before_it_joined;
  };
  const auto seen = run_ranks<Seen>(3, [](const Rank& self) {
    DistributedDataParallel model(std::make_shared<Reversed>(), in(self).bucket_cap_mb(0.01));
    bool before = false;
    model->join([&] {
      for (int i = 0; i < (self.rank * 3) % 5; ++i) {  // 0, 3 and 1
        model->zero_grad();
        model->forward(torch::ones({2, 64})).sum().backward();
      }
      before = model->stats().rebuilds > 0;
    });
    return Seen{model->stats().buckets, model->stats().rebuilds > 0, before};
  });
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(seen[rank].buckets == std::vector<std::vector<size_t>>{{0}, {1}});
    CHECK(seen[rank].rebuilt);
    CHECK(seen[rank].rebuilt_before_it_joined == (rank == 1));
  }
}

TEST_CASE("two models can be in one join", "[ranks][join][many]") {
  const auto gradients = run_ranks<std::vector<float>>(3, [](const Rank& self) {
    DistributedDataParallel first(make_linear(), in(self));
    DistributedDataParallel second(make_linear(), in(self));
    std::vector<float> seen;
    join({first.get(), second.get()}, [&] {
      for (int i = 0; i < 1 + self.rank; ++i) {
        seen.push_back(step(first, 3));
        seen.push_back(step(second, 6));
      }
    });
    return seen;
  });
  CHECK(gradients[0] == std::vector<float>{3, 6});
  CHECK(gradients[1] == std::vector<float>{3, 6, 2, 4});
  CHECK(gradients[2] == std::vector<float>{3, 6, 2, 4, 1, 2});
}

TEST_CASE("a join costs one small all-reduce a backward pass", "[ranks][join]") {
  Events events;
  DistributedDataParallel model(
      make_linear(), DistributedDataParallelOptions()
                         .process_group(recording_group(0, 2, events))
                         .init_sync(false));
  const auto sent = [&](const std::function<void()>& body) {
    events.clear();
    body();
    return std::count(events.begin(), events.end(), "allreduce 4");
  };
  const auto steps = [&] {
    for (int i = 0; i < 5; ++i) step(model, 1);
  };
  steps();
  size_t inside = 0;
  CHECK(sent(steps) == 0);
  const size_t outside = events.size();
  // Four numbers (two ranks, two each): one all-reduce for each step, and two at the end.
  CHECK(sent([&] {
          model->join([&] {
            steps();
            inside = events.size();
          });
        }) == 7);
  CHECK(inside == outside + 5);
}

TEST_CASE("ranks may accumulate over different numbers of passes", "[ranks][join]") {
  const auto gradients = run_ranks<float>(2, [](const Rank& self) {
    auto net = make_linear();
    DistributedDataParallel model(net, in(self));
    model->join([&] {
      step(model, 1);
      net->zero_grad();
      for (int i = 0; i < 2 * self.rank; ++i) {
        const auto guard = model->no_sync();
        model->forward(torch::ones({1, 1})).sum().backward();
      }
      model->forward(torch::ones({1, 1})).sum().backward();
    });
    return net->weight.grad().item<float>();
  });
  CHECK(gradients == std::vector<float>{2, 2});  // the mean of 1 and 3
}

TEST_CASE("a forward pass in a join needs no backward pass", "[ranks][join][many]") {
  const auto gradients = run_ranks<std::vector<float>>(3, [](const Rank& self) {
    auto net = make_linear();
    DistributedDataParallel model(net, in(self));
    std::vector<float> seen;
    model->join([&] {
      for (int i = 0; i < 1 + self.rank; ++i) {
        net->zero_grad();
        model->eval();
        for (int metric = 0; metric < self.rank; ++metric) model->forward(torch::ones({1, 1}));
        model->train();
        model->forward(torch::full({1, 1}, self.rank + 1.0f)).sum().backward();
        seen.push_back(net->weight.grad().item<float>());
      }
    });
    return seen;
  });
  REQUIRE(gradients[2].size() == 3);
  const double expected[] = {6 / 3.0, 5 / 3.0, 3 / 3.0};
  for (size_t i = 0; i < 3; ++i) CHECK(gradients[2][i] == Approx(expected[i]));
}

TEST_CASE(
    "ranks that accumulate differently throw with early termination", "[ranks][errors][join]") {
  const auto error = error_of_all(2, kLongTimeout, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self));
    model->join(
        [&] {
          step(model, 1);
          if (self.rank == 1) {
            const auto guard = model->no_sync();
            step(model, 1);
          }
          step(model, 1);
        },
        JoinOptions().throw_on_early_termination(true));
  });
  CHECK_THAT(error, ContainsText("but rank 0 will average its gradients and rank 1 will not"));
}

TEST_CASE("ranks may run different evaluations in a join", "[ranks][join]") {
  const auto seen = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(1), torch::nn::Linear(1, 1));
    DistributedDataParallel model(net, in(self));
    const auto x = torch::tensor({{1.0f}, {2.0f}, {4.0f}}) * (self.rank + 1);
    model->join([&] {
      for (int i = 0; i < 2 + self.rank; ++i) {
        model->forward(x).pow(2).sum().backward();
        const torch::NoGradGuard no_grad;
        model->eval();
        for (int e = 0; e < i + self.rank; ++e) model->forward(x);
        model->train();
      }
    });
    const auto& mean = net[0]->as<torch::nn::BatchNorm1d>()->running_mean;
    return std::vector<float>{mean.item<float>()};
  });
  CHECK(seen[0] == seen[1]);
}

TEST_CASE(
    "a forward pass without a backward one is an error with early termination",
    "[ranks][errors][join][many]") {
  const auto error = error_of_all(3, kLongTimeout, [&](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self));
    const auto seen = timed_error_of([&] {
      model->join(
          [&] {
            if (self.rank == 1) model->forward(torch::ones({1, 1}));
            for (int i = 0; i < 3; ++i) step(model, 1);
          },
          JoinOptions().throw_on_early_termination(true));
    });
    TORCH_CHECK(seen.seconds < 5, "after ", seen.seconds, " s: ", seen.error);
    TORCH_CHECK(false, seen.error);
  });
  CHECK_THAT(
      error, ContainsText("expected all ranks at the same place of an iteration") &&
                 ContainsText("the backward pass of object 0 on rank") &&
                 ContainsText("NoGradGuard"));
}

TEST_CASE(
    "a forward pass needs no backward pass where several objects join", "[ranks][join][many]") {
  const auto totals = run_ranks<double>(3, [](const Rank& self) {
    Counter counter(self.group);
    DistributedDataParallel model(make_linear(), in(self));
    join({model.get(), &counter}, [&] {
      for (int i = 0; i < 1 + self.rank; ++i) {
        model->eval();
        for (int metric = 0; metric < self.rank; ++metric) model->forward(torch::ones({1, 1}));
        model->train();
        step(model, 1);
        counter.iterate();
      }
    });
    return counter.total();
  });
  for (const double total : totals) CHECK(total == 6);
}

TEST_CASE("buffers come from the highest rank with input in each pass", "[ranks][join]") {
  struct Summing : torch::nn::Module {
    Summing() {
      w = register_parameter("w", torch::ones({1}));
      sum = register_buffer("sum", torch::zeros({1}));
    }
    at::Tensor forward(const at::Tensor& x) {
      sum.add_(x);
      return w * x;
    }
    at::Tensor w, sum;
  };
  const auto sums = run_ranks<float>(2, [](const Rank& self) {
    const auto net = std::make_shared<Summing>();
    DistributedDataParallel model(net, in(self));
    model->join([&] {
      for (int i = 0; i < 3 - 2 * self.rank; ++i) {
        model->forward(torch::full({1}, self.rank == 0 ? 1.0f : 10.0f)).sum().backward();
      }
    });
    return net->sum.item<float>();
  });
  CHECK(sums == std::vector<float>{12, 12});  // Python gives 3
}

TEST_CASE("a model trained in the body has to be in the join", "[ranks][errors][join]") {
  const auto seen = run_ranks<TimedError>(2, kLongTimeout, [](const Rank& self) {
    DistributedDataParallel one(make_linear(), in(self)), other(make_linear(), in(self));
    return timed_error_of([&] {
      one->join([&] {
        for (int i = 0; i < 1 + 2 * self.rank; ++i) {
          step(one, 1);
          step(other, 1);
        }
      });
    });
  });
  for (const auto& rank : seen) {
    CHECK_THAT(
        rank.error, ContainsText("expected every model that is trained in the body to join"));
    CHECK(rank.seconds < 5);
  }
}

TEST_CASE("classes of the user's own can join", "[ranks][join][many]") {
  struct Seen {
    double total;
    int shadowed;
    bool was_last;
    float gradient;
  };
  const bool counter_first = GENERATE(true, false);
  const auto seen = run_ranks<Seen>(3, [&](const Rank& self) {
    Counter counter(self.group);
    DistributedDataParallel model(make_linear(), in(self));
    std::vector<Joinable*> joinables{&counter, model.get()};
    if (!counter_first) std::swap(joinables[0], joinables[1]);
    float gradient = 0;
    join(joinables, [&] {
      for (int i = 0; i < 1 + self.rank; ++i) {
        if (counter_first) counter.iterate();
        gradient = step(model, 3);
        if (!counter_first) counter.iterate();
      }
    });
    return Seen{counter.total(), counter.shadowed(), counter.was_last(), gradient};
  });
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(seen[rank].total == 6);  // 1 + 2 + 3 iterations
    CHECK(seen[rank].shadowed == 2 - rank);
    CHECK(seen[rank].was_last == (rank == 2));
    CHECK(seen[rank].gradient == 3 - rank);
  }
}

TEST_CASE("invalid joins throw", "[ranks][errors][join]") {
  CHECK_THROWS_WITH(join({}, [] {}), ContainsText("expected at least one Joinable"));
  CHECK_THROWS_WITH(join({nullptr}, [] {}), ContainsText("got a null pointer"));
  const auto errors = run_ranks<std::vector<std::string>>(1, [](const Rank& self) {
    Counter here(self.group), there(self.group);
    Counter elsewhere(c10::make_intrusive<c10d::ProcessGroup>(self.store, 0, 1));
    return std::vector<std::string>{
        error_of([&] {
          join({&here, &elsewhere}, [] {});
        }),
        error_of([&] { join({&here}, {}); }),
        error_of([&] { join({&here}, [&] { join({&here}, [] {}); }); }),
        error_of([&] { join({&here}, [&] { join({&there}, [] {}); }); })};
  });
  CHECK_THAT(errors[0][0], ContainsText("one process group, got different ones"));
  CHECK_THAT(errors[0][1], ContainsText("got an empty function"));
  for (const int i : {2, 3}) CHECK_THAT(errors[0][i], ContainsText("Joins cannot be nested"));
}

}  // namespace ddp
