// Gradients that are sent in one byte each, as integers or fp8. What Python's quantization hooks
// make of a bucket is recorded in fixtures/quantization.txt.
#include <ddp/int8_compress.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <ddp/collective_backend.h>
#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/recording_backend.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;
using ddp::hooks::ByteCompress;
using ddp::hooks::Fp8Compress;
using ddp::hooks::Fp8Options;
using ddp::hooks::Int8Compress;
using ddp::hooks::Int8Options;
using ddp::hooks::Quantization;

constexpr float kInfinite = std::numeric_limits<float>::infinity();

/// The result of the hook for a bucket of one parameter.
at::Tensor averaged(const ddp::CommHook& hook, const at::Tensor& gradient) {
  const auto buffer = gradient.clone();
  ddp::GradBucket bucket(0, /*is_last=*/true, buffer, {buffer}, {torch::zeros_like(buffer)});
  const auto future = hook(bucket);
  future->wait();
  return future->value().toTensor().clone();
}

/// A way to quantize.
struct ByteWay {
  std::string name;
  std::function<ByteCompress(const ddp::GroupArg&)> make;
  double most_lost;  // of the means of normal values
  bool is_whole = false;
};

std::vector<ByteWay> all_ways(int64_t block) {
  const auto int8 = [block](Quantization per) {
    return [=](const ddp::GroupArg& group) {
      return Int8Compress(Int8Options().block(block).per(per), group);
    };
  };
  const auto fp8 = [block](at::ScalarType dtype) {
    return [=](const ddp::GroupArg& group) {
      return Fp8Compress(Fp8Options().block(block).dtype(dtype), group);
    };
  };
  // Half a step of each quantization. A step of integers' widest range is 8 / 127; the one below a
  // float of 4 is 1 / 4 or 1 / 2.
  return {
      {"int8", int8(Quantization::Block), 0.065},
      {"int8 of tensors", int8(Quantization::Tensor), 0.065, /*is_whole=*/true},
      {"int8 of channels", int8(Quantization::Channel), 0.065},
      {"e4m3", fp8(at::kFloat8_e4m3fn), 0.3},
      {"e5m2", fp8(at::kFloat8_e5m2), 0.6}};
}

/// The default ways of int8 and fp8.
std::vector<ByteWay> both_ways() {
  const auto all = all_ways(256);
  return {all[0], all[3]};
}

/// A step's losses on two ranks of a small net that learns another one.
std::vector<double> losses_of(const Rank& self, const ddp::CommHook& hook, int steps) {
  torch::nn::Sequential net(
      torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 64), torch::nn::Tanh(),
      torch::nn::Linear(64, 4));
  draw_normal(*net, 0.15);
  ddp::DistributedDataParallel model(
      net, ddp::DistributedDataParallelOptions()
               .process_group(self.group)
               .gradient_as_bucket_view(true)
               .bucket_cap_mb_list({0.004}));
  if (hook) model->register_comm_hook(hook);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto teacher = draw_values({16, 4}, 7, torch::kFloat);
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const auto x = draw_values({32, 16}, 100 + 2 * step + self.rank, torch::kFloat);
    model->zero_grad();
    const auto loss = torch::mse_loss(model->forward(x), x.matmul(teacher).tanh());
    loss.backward();
    optimizer.step();
    losses.push_back(loss.template item<double>());
  }
  losses.push_back(flattened(net->parameters()).to(torch::kDouble).sum().item<double>());
  return losses;
}

/// Completes collectives at once, as if all ranks sent what this one does, and records them.
class CountingBackend : public ddp::CollectiveBackend {
 public:
  CountingBackend(int rank, int size) : ddp::CollectiveBackend(rank, size) {}

  const std::string getBackendName() const override { return "counting"; }
  WorkPtr run(ddp::Collective c) override {
    const auto outputs = c.outputs();
    if (c.kind == Kind::AllToAll) {
      const auto inputs = c.inputs();
      for (size_t i = 0; i < outputs.size(); ++i) outputs[i].copy_(inputs[i]);
      bytes += inputs[0].numel() * (getSize() - 1);
      calls += "x";
    } else {
      TORCH_CHECK(c.kind == Kind::AllGather);
      for (const auto& out : outputs) out.copy_(c.in[0].view(out.sizes()));
      bytes += c.in[0].numel() * (getSize() - 1);
      calls += "g";
    }
    return c10::make_intrusive<Done>();
  }

  int64_t bytes = 0;  // that this rank sends
  std::string calls;

 private:
  class Done : public c10d::Work {
   public:
    Done() { finish(); }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
      future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
      return future;
    }
  };
};

}  // namespace

TEST_CASE(
    "gradients in bytes are averaged, and all ranks have the same bits", "[int8][ranks][many]") {
  const int world = GENERATE(1, 2, 3);
  const auto dtype = GENERATE(torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16);
  for (const auto& way : all_ways(64)) {
    for (const int64_t values : {1, 3, 1000}) {
      const auto gradient = [&](int rank) { return draw_values({values}, 10 + rank, dtype); };
      const auto seen = run_ranks<at::Tensor>(world, [&](const Rank& self) {
        return averaged(way.make(self.group), gradient(self.rank));
      });
      auto mean = torch::zeros({values}, torch::kDouble);
      for (int rank = 0; rank < world; ++rank) mean += gradient(rank).to(torch::kDouble) / world;
      CAPTURE(world, dtype, values, way.name);
      CHECK(seen[0].scalar_type() == dtype);
      for (const auto& values_of_rank : seen) CHECK(torch::equal(values_of_rank, seen[0]));
      CHECK(difference(seen[0].to(torch::kDouble), mean) < way.most_lost);
    }
  }
}

// The second element is half a step of a rank in each step, or lost by the mean's scale.
TEST_CASE("what quantization lost is sent later", "[int8][ranks]") {
  struct Case {
    std::vector<std::vector<double>> gradients;  // by rank; shares are of 4 values
    double mean;                                 // of elements 1 and 4
    double rounded;
    bool is_fp8;
  };
  const std::vector<double> same{127, 0.25, 0, 0, 0.25, 0, 127, 0};
  const std::vector<double> floats{448, 17, 0, 0, 17, 0, 448, 0};
  const std::vector<Case> cases{
      {{same, same}, 0.25, 0, false},
      {{{127, 1, 0, 0, 1, 0, 127, 0}, {254, 0, 0, 0, 0, 0, 254, 0}}, 0.5, 0, false},
      {{floats, floats}, 17, 16, true},
      // Ranks' values are exact, and their mean is not.
      {{{448, 16, 0, 0, 16, 0, 448, 0}, {448, 18, 0, 0, 18, 0, 448, 0}}, 17, 16, true}};
  for (const auto& c : cases) {
    const auto sums = [&](bool feeds_back) {
      return run_ranks<at::Tensor>(2, [&](const Rank& self) {
        const auto hook =
            c.is_fp8
                ? ddp::hooks::fp8_compress(Fp8Options().error_feedback(feeds_back), self.group)
                : ddp::hooks::int8_compress(Int8Options().error_feedback(feeds_back), self.group);
        const auto gradient = torch::tensor(c.gradients[static_cast<size_t>(self.rank)]);
        auto sum = torch::zeros({8});
        for (int step = 0; step < 60; ++step) sum += averaged(hook, gradient.to(torch::kFloat));
        return sum;
      });
    };
    const auto with = sums(true), without = sums(false);
    CHECK(torch::equal(with[0], with[1]));
    CAPTURE(c.is_fp8, c.mean);
    for (const int64_t i : {1, 4}) {
      CHECK(std::abs(with[0][i].item<double>() - 60 * c.mean) <= 3);
      CHECK(without[0][i].item<double>() == 60 * c.rounded);
    }
  }
}

TEST_CASE("Int8Compress rounds as Python's hooks, and the means again", "[int8][ranks]") {
  const auto waves = [](int rank, double scale, double start) {
    const auto angles = torch::arange(48, torch::kDouble) * (0.7 + rank) + rank;
    return (angles.sin() * scale + start).to(torch::kFloat);
  };
  const std::map<std::string, std::pair<double, double>> cases{
      {"mixed", {1, 0}}, {"positive", {0.5, 1.5}}, {"negative", {2, -1.2}}, {"small", {1e-3, 0}}};
  std::ifstream file(DDP_FIXTURES "/quantization.txt");
  int lines = 0;
  for (std::string line; std::getline(file, line); ++lines) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    std::vector<float> numbers(96);
    for (auto& number : numbers) words >> number;
    const auto recorded = torch::tensor(numbers).view({2, 48});
    const bool is_tensor = name.find("tensor_") == 0;
    const auto [scale, start] = cases.at(name.substr(name.find('_') + 1));
    const auto seen = run_ranks<at::Tensor>(
        2, [&, is_tensor = is_tensor, scale = scale, start = start](const Rank& self) {
          const auto hook = ddp::hooks::int8_compress(
              Int8Options().block(8).per(is_tensor ? Quantization::Tensor : Quantization::Channel),
              self.group);
          return averaged(hook, waves(self.rank, scale, start));
        });
    CAPTURE(name);
    CHECK(difference(seen[0], recorded[1]) <= 1e-6 * recorded.abs().max().item<double>());
    CHECK(difference(seen[0], recorded[0]) > 0);
    CHECK(difference(seen[0], recorded[0]) <= (scale + std::abs(start)) / 255);
  }
  CHECK(lines == 8);
}

TEST_CASE("a byte a value is half of bfloat16's bytes, on any number of ranks", "[int8][pure]") {
  const bool is_fp8 = GENERATE(false, true);
  const int world = GENERATE(2, 3, 64);
  const auto backend = c10::make_intrusive<CountingBackend>(0, world);
  const auto group = group_over(backend);
  constexpr int64_t kValues = 1'000'000;
  averaged(both_ways()[is_fp8 ? 1 : 0].make(group), torch::ones({kValues}));
  const auto of_bf16 = 2.0 * 2 * kValues * (world - 1) / world;
  CHECK(static_cast<double>(backend->bytes) <= 0.51 * of_bf16);
  // A byte a value, and a scale for 256 of them.
  CHECK(static_cast<double>(backend->bytes) >= 0.507 * of_bf16);
}

TEST_CASE("Int8Compress starts collectives in one order", "[int8][pure]") {
  const auto backend = c10::make_intrusive<CountingBackend>(0, 2);
  const ddp::CommHook hook = ddp::hooks::int8_compress({}, group_over(backend));
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
  for (size_t i = 0; i < 3; ++i) {
    const auto buffer = torch::ones({104});
    ddp::GradBucket bucket(i, i == 2, buffer, {buffer}, {buffer});
    futures.push_back(hook(bucket));
  }
  CHECK(backend->calls == "xxgxgg");
  for (const auto& future : futures) {
    future->wait();
    CHECK(torch::allclose(future->value().toTensor(), torch::ones({104})));
  }
}

TEST_CASE("a gradient that is not finite stays so on all ranks", "[int8][ranks]") {
  const float value = GENERATE(as<float>{}, kInfinite, -kInfinite, NAN);
  const auto dtype = GENERATE(torch::kFloat, torch::kHalf);
  for (const auto& way : all_ways(8)) {
    const auto seen = run_ranks<at::Tensor>(2, [&](const Rank& self) {
      auto gradient = torch::ones({64}, dtype);
      if (self.rank == 1) gradient[40] = value;
      return averaged(way.make(self.group), gradient);
    });
    CAPTURE(value, way.name);
    for (const auto& found : seen) {
      CHECK_FALSE(found[40].isfinite().item<bool>());
      CHECK(found.isfinite().sum().item<int64_t>() == (way.is_whole ? 0 : 56));
    }
  }
}

TEST_CASE("gradients in bytes train as without a hook", "[int8][ranks]") {
  constexpr int kSteps = 150;
  const auto last_loss = [](const std::vector<double>& losses) {
    double sum = 0;
    for (int i = kSteps - 50; i < kSteps; ++i) sum += losses[static_cast<size_t>(i)] / 50;
    return sum;
  };
  const auto run = [&](const ByteWay* way) {
    return run_ranks<std::vector<double>>(2, [&](const Rank& self) {
      return losses_of(self, way ? ddp::CommHook(way->make(self.group)) : nullptr, kSteps);
    });
  };
  const auto plain = last_loss(run(nullptr)[0]);
  CHECK(plain < 0.1);
  for (const auto& way : all_ways(256)) {
    if (way.name == "int8 of channels") continue;
    const auto seen = run(&way);
    CHECK(seen[0].back() == seen[1].back());  // the sum of parameters
    const auto loss = last_loss(seen[0]);
    CAPTURE(way.name, plain, loss);
    CHECK(std::abs(loss / plain - 1) < 0.03);
  }
}

TEST_CASE("what was lost continues from a checkpoint as if uninterrupted", "[int8][ranks]") {
  const TemporaryFolder folder;
  const auto way = GENERATE(from_range(both_ways()));
  const auto gradient = draw_values({100}, 3, torch::kFloat);
  const auto ends = [&](bool is_resumed) {
    return run_ranks<at::Tensor>(2, [&](const Rank& self) {
      auto hook = way.make(self.group);
      ddp::Checkpointer checkpointer(
          folder.path(), ddp::CheckpointerOptions().process_group(self.group));
      checkpointer.add_per_rank("hook", hook);
      if (is_resumed) {
        checkpointer.load(3);
      } else {
        for (int step = 0; step < 3; ++step) averaged(hook, gradient);
        checkpointer.save(3);
        checkpointer.wait();
      }
      return averaged(hook, gradient);
    });
  };
  const auto whole = ends(false);
  CHECK(all_equal(ends(true), whole));
  const auto anew = run_ranks<at::Tensor>(
      2, [&](const Rank& self) { return averaged(way.make(self.group), gradient); });
  CHECK_FALSE(torch::equal(anew[0], whole[0]));
}

TEST_CASE("Int8Compress keeps errors over no_sync and rebuilt buckets", "[int8][ranks]") {
  const bool as_view = GENERATE(false, true);
  const auto sums = run_ranks<std::vector<at::Tensor>>(2, [&](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8));
    set_waves(*net);
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions()
                 .process_group(self.group)
                 .gradient_as_bucket_view(as_view)
                 .bucket_cap_mb_list({1e-5}));
    model->register_comm_hook(ddp::hooks::int8_compress({}, self.group));
    const auto x = draw_values({4, 8}, 5 + self.rank, torch::kFloat);
    const auto backward = [&] { model->forward(x).square().mean().backward(); };
    std::vector<at::Tensor> sum;
    for (int step = 0; step < 40; ++step) {
      model->zero_grad();
      {
        const auto alone = model->no_sync();
        backward();
      }
      backward();
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        const auto grad = net->parameters()[i].grad().clone();
        if (step == 0) sum.push_back(torch::zeros_like(grad));
        sum[i] += grad / 40;
      }
    }
    net->zero_grad();
    for (int rank = 0; rank < 2; ++rank) {
      const auto y = draw_values({4, 8}, 5 + rank, torch::kFloat);
      net->forward(y).square().mean().backward();
    }
    for (const auto& p : net->parameters()) sum.push_back(p.grad().clone());  // what is expected
    return sum;
  });
  CHECK(sums[0].size() == 8);
  for (size_t i = 0; i < 4; ++i) {
    CHECK(torch::equal(sums[0][i], sums[1][i]));
    const auto largest = sums[0][4 + i].abs().max().item<double>();
    // In one step the difference would be a 250th part.
    CHECK(difference(sums[0][i], sums[0][4 + i]) < largest / 2000);
  }
}

TEST_CASE("Fp8Compress refuses options and dtypes", "[int8][errors][ranks]") {
  const auto errors_with = [](const Fp8Options& options, const at::Tensor& gradient) {
    return errors_of_ranks(2, [&](const Rank& self) {
      averaged(ddp::hooks::fp8_compress(options, self.group), gradient);
    });
  };
  const auto x = torch::ones({4});
  CHECK_THAT(
      errors_with(Fp8Options().block(0), x),
      Each(ContainsText("Fp8Compress: expected block to be at least 1, got 0")));
  CHECK_THAT(
      errors_with(Fp8Options().dtype(torch::kHalf), x),
      Each(ContainsText(
          "Fp8Compress: expected dtype to be Float8_e4m3fn or Float8_e5m2, got Half")));
  CHECK_THAT(
      errors_with({}, x.to(torch::kInt)),
      Each(ContainsText(
          "Fp8Compress: expected gradients of float, double, half or bfloat16, got Int")));
}

TEST_CASE("Int8Compress refuses options and dtypes", "[int8][errors][ranks]") {
  const auto errors = errors_of_ranks(
      2, [](const Rank& self) { Int8Compress(Int8Options().block(0), self.group); });
  CHECK_THAT(errors, Each(ContainsText("Int8Compress: expected block to be at least 1, got 0")));
  const auto dtype = GENERATE(torch::kComplexFloat, torch::kInt);
  const auto of_dtype = errors_of_ranks(2, [&](const Rank& self) {
    averaged(ddp::hooks::int8_compress({}, self.group), torch::ones({4}, dtype));
  });
  CHECK_THAT(
      of_dtype, Each(ContainsText("expected gradients of float, double, half or bfloat16, got ")));
}

TEST_CASE("the error of ranks without input is sent in a join", "[int8][ranks][many]") {
  const auto way = GENERATE(from_range(both_ways()));
  const auto ends = run_ranks<at::Tensor>(3, [&](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8));
    set_waves(*net);
    ddp::DistributedDataParallel model(
        net,
        ddp::DistributedDataParallelOptions().process_group(self.group).bucket_cap_mb_list({1e-4}));
    model->register_comm_hook(way.make(self.group));
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const auto train = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        const auto x = draw_values({4, 8}, 10 * step + self.rank, torch::kFloat);
        model->zero_grad();
        model->forward(x).square().mean().backward();
        optimizer.step();
      }
    };
    model->join([&] { train(4 + 2 * self.rank); });
    train(3);
    return flattened(net->parameters()).clone();
  });
  CHECK(ends[0].isfinite().all().item<bool>());
  CHECK(all_equal(ends, {ends[0], ends[0], ends[0]}));
}

TEST_CASE(
    "all ranks throw when one fails between Int8Compress's collectives", "[int8][errors][ranks]") {
  const size_t fails_at = GENERATE(0U, 1U, 2U);
  const auto errors = errors_of_ranks(3, kLongTimeout, [&](const Rank& self) {
    torch::nn::Sequential net(
        torch::nn::Linear(8, 8), torch::nn::Linear(8, 8), torch::nn::Linear(8, 8));
    ddp::DistributedDataParallel model(
        net,
        ddp::DistributedDataParallelOptions().process_group(self.group).bucket_cap_mb_list({1e-4}));
    const auto compress = ddp::hooks::int8_compress({}, self.group);
    int step = 0;
    model->register_comm_hook([&](ddp::GradBucket& bucket) {
      const bool fails = step == 1 && self.rank == 1 && bucket.index() == fails_at;
      TORCH_CHECK(!fails, "no memory for bucket ", fails_at);
      return compress(bucket);
    });
    for (; step < 3; ++step) model->forward(torch::ones({4, 8})).sum().backward();
  });
  for (const auto& error : errors) CHECK_THAT(error, ContainsText("no memory for bucket"));
}
