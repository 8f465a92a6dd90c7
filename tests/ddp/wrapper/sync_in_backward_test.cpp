// sync_in_backward(): averages the backward pass of forward passes that ran inside no_sync().
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/one_weight.h"
#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

constexpr int kMicroBatches = 4;
constexpr int kSteps = 3;

/// When a schedule calls sync_in_backward for the last micro-batch.
enum class Call { RightBefore, OneBackwardEarlier };

// Values that look random. Ranks are threads, which share the random generator.
at::Tensor values(at::IntArrayRef sizes, double seed) {
  const auto count = torch::arange(c10::multiply_integers(sizes), torch::kDouble);
  return (count * 1.7 + seed * 0.61).sin().view(sizes);
}

torch::nn::Sequential make_double_net() {
  torch::nn::Sequential net(
      torch::nn::Linear(3, 5), torch::nn::Tanh(), torch::nn::Linear(5, 2), torch::nn::Tanh());
  net->to(torch::kDouble);
  set_waves(*net, {1.7, 0.61, 0.61});
  return net;
}

/// The loss of one micro-batch, whose sum over the micro-batches is the mean over all rows.
at::Tensor loss_of(const at::Tensor& y, int64_t rows) { return y.pow(2).sum() / rows; }

/// The forward and backward passes of a step in 1F1B order, as the first of two stages runs them:
/// forward i + 1 comes before backward i.
template <typename Model>
void run_1f1b(Model& model, const std::vector<at::Tensor>& batches, Call call) {
  int64_t rows = 0;
  for (const auto& batch : batches) rows += batch.size(0);
  std::vector<at::Tensor> outputs;
  const auto forward = [&](size_t i) {
    const auto guard = model->no_sync();
    outputs.push_back(model->forward(batches[i]));
  };
  forward(0);
  for (size_t i = 0; i < batches.size(); ++i) {
    if (i + 1 < batches.size()) forward(i + 1);
    const size_t called_at = batches.size() - (call == Call::RightBefore ? 1 : 2);
    if (i == called_at) model->sync_in_backward(outputs.back());
    loss_of(outputs[i], rows).backward();
  }
}

/// `kMicroBatches` batches of rank `rank` in step `step`, of `rows` rows each.
std::vector<at::Tensor> batches_of(int rank, int step, const std::vector<int64_t>& rows) {
  std::vector<at::Tensor> batches;
  for (size_t i = 0; i < rows.size(); ++i) {
    batches.push_back(values({rows[i], 3}, 1000.0 * rank + 100.0 * step + 10.0 * i));
  }
  return batches;
}

/// The parameters after training on the micro-batches of all ranks in one process.
std::vector<at::Tensor> train_alone(const std::vector<std::vector<int64_t>>& rows_by_rank) {
  auto net = make_double_net();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> all;
    for (size_t rank = 0; rank < rows_by_rank.size(); ++rank) {
      for (auto& b : batches_of(static_cast<int>(rank), step, rows_by_rank[rank])) {
        all.push_back(std::move(b));
      }
    }
    const auto x = torch::cat(all);
    optimizer.zero_grad();
    loss_of(net->forward(x), x.size(0)).backward();
    optimizer.step();
  }
  return net->parameters();
}

}  // namespace

TEST_CASE("a 1F1B step is averaged once, and trains as one process", "[ranks][ddp][sync]") {
  const auto call = GENERATE(Call::RightBefore, Call::OneBackwardEarlier);
  const bool as_views = GENERATE(false, true);
  const bool counts_calls = GENERATE(false, true);
  const std::vector<int64_t> rows(kMicroBatches, 2);
  const auto expected = train_alone({rows, rows});
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    DistributedDataParallel model(
        make_double_net(),
        in(self).bucket_cap_mb(1e-6).gradient_as_bucket_view(as_views).stats_every(1));
    std::map<size_t, int> calls;  // by bucket
    if (counts_calls) {
      model->register_comm_hook([&, average = hooks::all_reduce(self.group)](GradBucket& bucket) {
        ++calls[bucket.index()];
        return average(bucket);
      });
    }
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      run_1f1b(model, batches_of(self.rank, step, rows), call);
      optimizer.step();
      for (const auto& [bucket, count] : std::exchange(calls, {})) {
        TORCH_CHECK(count == 1, count, " reductions of bucket ", bucket, " in step ", step);
      }
    }
    const auto stats = model->stats();
    TORCH_CHECK(stats.steps.size() == kSteps, stats.steps.size(), " reduced passes");
    TORCH_CHECK(stats.buckets.size() == 4, stats.buckets.size(), " buckets");
    TORCH_CHECK(
        all_close(model->module()->parameters(), expected, 1e-12, 1e-12), "other parameters");
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("samples of all micro-batches weigh a 1F1B step", "[ranks][ddp][sync]") {
  const std::vector<std::vector<int64_t>> rows{{1, 4, 2, 3}, {2, 1, 1, 1}};
  const auto expected = train_alone(rows);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    DistributedDataParallel model(make_double_net(), in(self).reduction(Reduction::SampleWeighted));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      run_1f1b(model, batches_of(self.rank, step, rows[self.rank]), Call::RightBefore);
      optimizer.step();
    }
    TORCH_CHECK(
        all_close(model->module()->parameters(), expected, 1e-12, 1e-12), "other parameters");
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("sync_in_backward works with each way to treat unused parameters", "[ranks][ddp][sync]") {
  const auto [find_unused, is_static] =
      GENERATE(table<bool, bool>({{true, false}, {false, true}, {true, true}}));
  CAPTURE(find_unused, is_static);
  const std::vector<int64_t> rows(kMicroBatches, 2);
  const auto expected = train_alone({rows, rows});
  const auto errors = errors_of_ranks(2, [&, a = find_unused, b = is_static](const Rank& self) {
    DistributedDataParallel model(
        make_double_net(), in(self).find_unused_parameters(a).static_graph(b));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      run_1f1b(model, batches_of(self.rank, step, rows), Call::OneBackwardEarlier);
      optimizer.step();
    }
    TORCH_CHECK(model->stats().steps.size() == kSteps);
    TORCH_CHECK(
        all_close(model->module()->parameters(), expected, 1e-12, 1e-12), "other parameters");
  });
  CHECK(errors == std::vector<std::string>(2));
}

namespace {

/// Two weights, 1, of which a pass uses one.
struct TwoWeightsImpl : torch::nn::Module {
  TwoWeightsImpl() {
    first = register_parameter("first", torch::ones({1}));
    second = register_parameter("second", torch::ones({1}));
  }
  at::Tensor forward(const at::Tensor& x, bool uses_first) {
    return (uses_first ? first : second) * x;
  }

  at::Tensor first, second;
};
TORCH_MODULE(TwoWeights);

/// The gradients after two forward passes, of a parameter each, and `backward`.
void check_two_weights(
    const std::function<void(
        DistributedDataParallel<TwoWeights>&, const std::vector<at::Tensor>& outputs)>& backward) {
  const auto seen = run_ranks<std::vector<float>>(2, [&](const Rank& self) {
    DistributedDataParallel model(TwoWeights(), in(self).find_unused_parameters(true));
    const auto x = torch::full({1}, self.rank + 1.0);
    std::vector<at::Tensor> outputs;
    {
      const auto guard = model->no_sync();
      outputs = {model->forward(x, true), model->forward(10 * x, false)};
    }
    backward(model, outputs);
    return std::vector<float>{
        model->module()->first.grad().item<float>(), model->module()->second.grad().item<float>()};
  });
  for (const auto& gradients : seen) CHECK(gradients == std::vector<float>{1.5, 15});
}

}  // namespace

TEST_CASE("what only earlier micro-batches used is averaged as well", "[ranks][ddp][sync]") {
  check_two_weights([](auto& model, const auto& outputs) {
    outputs[0].backward();
    model->sync_in_backward(outputs[1]);
    outputs[1].backward();
  });
}

TEST_CASE("outputs of two calls are averaged by one backward pass", "[ranks][ddp][sync]") {
  check_two_weights([](auto& model, const auto& outputs) {
    for (const auto& output : outputs) model->sync_in_backward(output);
    (outputs[0] + outputs[1]).backward();
  });
}

TEST_CASE("a schedule may begin the next step's forward passes early", "[ranks][ddp][sync]") {
  const auto seen = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    auto net = make_linear();
    DistributedDataParallel model(net, in(self));
    const auto guard = model->no_sync();
    const auto y1 = model->forward(torch::full({1, 1}, self.rank + 1.0));
    const auto y2 = model->forward(torch::full({1, 1}, self.rank + 5.0));
    std::vector<float> gradients;
    for (const auto& y : {y1, y2}) {
      net->weight.mutable_grad() = at::Tensor();
      model->sync_in_backward(y);
      y.sum().backward();
      gradients.push_back(net->weight.grad().item<float>());
    }
    return gradients;
  });
  for (const auto& gradients : seen) CHECK(gradients == std::vector<float>{1.5, 5.5});
}

TEST_CASE("rank 0's buffers come with the averaged pass of a 1F1B step", "[ranks][ddp][sync]") {
  const auto means = run_ranks<at::Tensor>(2, [](const Rank& self) {
    torch::nn::BatchNorm1d norm(3);
    norm->to(torch::kDouble);
    DistributedDataParallel model(norm, in(self));
    run_1f1b(model, batches_of(self.rank, 0, {4, 4, 4, 4}), Call::RightBefore);
    return norm->running_mean.clone();
  });
  CHECK(torch::equal(means[0], means[1]));
  torch::nn::BatchNorm1d alone(3);
  alone->to(torch::kDouble);
  for (const auto& batch : batches_of(0, 0, {4, 4, 4, 4})) alone->forward(batch);
  CHECK(torch::allclose(means[0], alone->running_mean));
}

TEST_CASE("no_sync() and forward passes outside it stay as they are", "[ranks][ddp][sync]") {
  const auto seen = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self));
    const auto& weight = model->module()->weight;
    const auto x = torch::full({1, 1}, self.rank + 1.0);
    std::vector<float> gradients;
    const auto backward = [&](bool local, bool synced) {
      model->zero_grad();
      at::Tensor y;
      if (local) {
        const auto guard = model->no_sync();
        y = model->forward(x);
      } else {
        y = model->forward(x);
      }
      if (synced) model->sync_in_backward(y);
      y.sum().backward();
      gradients.push_back(weight.grad().item<float>());
    };
    for (int i = 0; i < 2; ++i) {
      backward(true, true);
      backward(true, false);
      backward(false, false);
      backward(true, false);
    }
    return gradients;
  });
  CHECK(seen[0] == std::vector<float>{1.5, 1, 1.5, 1, 1.5, 1, 1.5, 1});
  CHECK(seen[1] == std::vector<float>{1.5, 2, 1.5, 2, 1.5, 2, 1.5, 2});
}

TEST_CASE("sync_in_backward takes all that can hold tensors", "[ranks][ddp][sync]") {
  const auto seen = run_ranks<float>(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self));
    const auto train = [&](auto sync) {
      const auto guard = model->no_sync();
      const auto y = model->forward(torch::full({1, 1}, self.rank + 1.0));
      const auto loss = y.sum();
      sync(y, loss);
      loss.backward();
    };
    train([&](const at::Tensor& y, const at::Tensor&) {
      model->sync_in_backward(std::vector<at::Tensor>{y});
    });
    train([&](const at::Tensor& y, const at::Tensor&) {
      model->sync_in_backward(std::make_tuple(y, 3, torch::ones({1})));
    });
    train([&](const at::Tensor&, const at::Tensor& loss) { model->sync_in_backward(loss); });
    return model->module()->weight.grad().item<float>();
  });
  for (const float gradient : seen) CHECK(gradient == 4.5);
}

TEST_CASE("sync_in_backward averages tensors of no module", "[ranks][ddp][sync]") {
  const auto seen = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    auto shift = torch::zeros({1}, torch::requires_grad());
    DistributedDataParallel model(make_linear(), in(self));
    model->also_average({shift});
    at::Tensor y;
    {
      const auto guard = model->no_sync();
      y = model->forward(torch::full({1, 1}, self.rank + 1.0));
    }
    model->sync_in_backward(y);
    // Autograd accumulates the gradient of `shift` before it reaches `y`.
    (y.sum() + shift.sum() * (self.rank * 4.0)).backward();
    return std::vector<float>{
        model->module()->weight.grad().item<float>(), shift.grad().item<float>()};
  });
  for (const auto& gradients : seen) CHECK(gradients == std::vector<float>{1.5, 2});
}

TEST_CASE("sync_in_backward works in low precision", "[ranks][ddp][sync]") {
  const auto seen = run_ranks<float>(2, [](const Rank& self) {
    DistributedDataParallel model(
        make_linear(), in(self).mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16)));
    std::vector<at::Tensor> outputs;
    {
      const auto guard = model->no_sync();
      for (int i = 1; i <= 2; ++i) {
        outputs.push_back(model->forward(torch::full({1, 1}, i * (self.rank + 1.0))));
      }
    }
    outputs[0].sum().backward();
    model->sync_in_backward(outputs[1]);
    outputs[1].sum().backward();
    return model->module()->weight.grad().item<float>();
  });
  for (const float gradient : seen) CHECK(gradient == 4.5);
}

TEST_CASE("a join takes steps with sync_in_backward", "[ranks][ddp][sync]") {
  const bool ends_early = GENERATE(false, true);
  const auto seen = run_ranks<std::vector<float>>(2, [&](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self));
    std::vector<float> gradients;
    const auto options = JoinOptions().throw_on_early_termination(ends_early);
    const int steps = ends_early || self.rank == 0 ? 3 : 1;
    model->join(
        [&] {
          for (int step = 0; step < steps; ++step) {
            model->zero_grad();
            std::vector<at::Tensor> outputs;
            {
              const auto guard = model->no_sync();
              for (int i = 0; i < 2; ++i) {
                outputs.push_back(model->forward(torch::full({1, 1}, self.rank + 1.0)));
              }
            }
            outputs[0].sum().backward();
            model->sync_in_backward(outputs[1]);
            outputs[1].sum().backward();
            gradients.push_back(model->module()->weight.grad().item<float>());
          }
        },
        options);
    return gradients;
  });
  CHECK(seen[0] == (ends_early ? std::vector<float>{3, 3, 3} : std::vector<float>{3, 1, 1}));
}

TEST_CASE("sync_in_backward refuses outputs that no averaged pass can use", "[ranks][ddp][sync]") {
  const auto errors = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self));
    const auto x = torch::full({1, 1}, self.rank + 1.0);
    std::vector<std::string> errors;
    const auto refuse = [&](const at::Tensor& outputs) {
      errors.push_back(error_of([&] { model->sync_in_backward(outputs); }));
    };
    refuse(x);  // before any forward pass
    at::Tensor y;
    {
      const auto guard = model->no_sync();
      y = model->forward(x);
    }
    refuse(y.detach());
    refuse(at::Tensor());
    y.register_hook([&](const at::Tensor&) { refuse(y); });
    y.sum().backward();
    // Each rank threw the same errors, so the group is usable, and the counts of passes are equal.
    TORCH_CHECK(step(model, self.rank + 1.0) == 1.5);
    return errors;
  });
  for (int rank = 0; rank < 2; ++rank) {
    REQUIRE(errors[rank].size() == 4);
    const auto where = "rank " + std::to_string(rank) + " of 2";
    for (const auto& error : errors[rank]) CHECK_THAT(error, ContainsText(where));
    CHECK_THAT(errors[rank][0], ContainsText("got 1 tensor without one"));
    CHECK_THAT(errors[rank][1], ContainsText("got 1 tensor without one"));
    CHECK_THAT(errors[rank][2], ContainsText("got 1 tensor without one"));
    CHECK_THAT(errors[rank][3], ContainsText("got a call inside one"));
  }
}

TEST_CASE("a rank whose sync_in_backward throws ends the others", "[ranks][errors][ddp][sync]") {
  const auto seen = run_ranks<TimedError>(2, kLongTimeout, [](const Rank& self) -> TimedError {
    DistributedDataParallel model(make_linear(), in(self));
    const auto guard = model->no_sync();
    const auto y = model->forward(torch::ones({1, 1}));
    const auto seen = timed_error_of([&] {
      model->sync_in_backward(self.rank == 1 ? y.detach() : y);
      y.sum().backward();
    });
    self.wait_until_others_end();
    return seen;
  });
  CHECK_THAT(seen[1].error, ContainsText("sync_in_backward: expected an output that has a graph"));
  CHECK_THAT(
      seen[0].error, ContainsText("sync_in_backward threw on rank 1 of 2: sync_in_backward: "));
  CHECK(seen[0].seconds < 5);
}

TEST_CASE("ranks that call sync_in_backward unequally often throw", "[ranks][errors][ddp][sync]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self));
    const auto guard = model->no_sync();
    for (int i = 0; i < 2 - self.rank; ++i) {
      const auto y = model->forward(torch::ones({1, 1}));
      model->sync_in_backward(y);
      if (i + self.rank == 1) y.sum().backward();  // rank 0 leaves its first one out
    }
  });
  CHECK_THAT(
      errors,
      Each(ContainsText("2 training forward passes came since the last reduced backward pass "
                        "on rank 0 of 2")));
}

}  // namespace ddp
