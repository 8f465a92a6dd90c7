// Gradients that are sent in one byte each. What Python's quantization hooks make of a bucket is
// recorded in fixtures/quantization.txt.
#include <ddp/int8_compress.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <ddp/collective_backend.h>
#include <ddp/ddp.h>
#include <ddp/internal/quantized_rows.h>
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

std::vector<Int8Options> all_kinds(int64_t block) {
  const auto options = Int8Options().block(block);
  return {
      options, Int8Options(options).per(Quantization::Tensor),
      Int8Options(options).per(Quantization::Channel)};
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

TEST_CASE("loops of the CPU encode to the bytes of LibTorch's operations", "[int8][pure]") {
  const int64_t block = GENERATE(0, 1, 5, 256);
  const bool has_zero_points = GENERATE(false, true);
  const bool keeps_error = GENERATE(false, true);
  for (const int64_t values : {1, 7, 256, 1000, 5000}) {
    for (const int64_t rows : {1, 3}) {
      const ddp::RowLayout layout(values, rows, block, has_zero_points);
      REQUIRE(layout.bytes() % 4 == 0);
      auto x = draw_values({values}, 3, torch::kFloat);
      if (values == 256) x.zero_();
      if (values == 1000) x.mul_(1e-44);
      if (values == 5000) {
        x[10] = kInfinite, x[2000] = NAN, x[2001] = -kInfinite;
        x.narrow(0, 700, 600).zero_();
      }
      CAPTURE(block, has_zero_points, values, rows);
      ddp::EncodeOptions options;
      options.feedback = draw_values({values}, 4, torch::kFloat) * 0.01;
      options.keeps_error = keeps_error;
      options.is_one_range = has_zero_points && block == 0;
      auto fast = x.clone(), slow = x.clone();
      const auto bytes = ddp::encode_rows(fast, rows, layout, options);
      const auto other = ddp::by_operations::encode_rows(slow, rows, layout, options);
      REQUIRE(bytes.sizes() == other.sizes());
      // NaN may be any of its bits.
      if (values != 5000) CHECK(torch::equal(bytes, other));
      auto of_other = torch::empty_like(x);
      ddp::decode_rows(other, layout, of_other);
      const auto is_finite = fast.isfinite();
      CHECK(torch::allclose(fast.where(is_finite, 0), slow.where(is_finite, 0), 0, 1e-7));
      CHECK_FALSE(slow.isfinite().logical_and(~is_finite).any().item<bool>());
      CHECK(torch::allclose(
          ddp::mean_of_rows(bytes, layout), ddp::by_operations::mean_of_rows(bytes, layout), 1e-6,
          0, /*equal_nan=*/true));
      auto kept = torch::empty_like(x);
      ddp::decode_rows(bytes, layout, fast, kept);
      ddp::by_operations::decode_rows(bytes, layout, slow);
      CHECK(torch::allclose(fast, slow, 0, 0, /*equal_nan=*/true));
      CHECK(torch::allclose(fast, of_other, 0, 0, /*equal_nan=*/true));
    }
  }
}

TEST_CASE("a value is rounded by at most half of its block's step", "[int8][pure]") {
  const auto x = draw_values({1000}, 1, torch::kFloat);
  x.narrow(0, 512, 256).zero_();
  const ddp::RowLayout layout(1000, 1, 256, /*has_zero_points=*/false);
  CHECK(layout.bytes() == 1000 + 4 * 4);
  auto error = x.clone();
  ddp::EncodeOptions options;
  options.keeps_error = true;
  const auto bytes = ddp::encode_rows(error, 1, layout, options);
  auto decoded = torch::empty_like(x);
  ddp::decode_rows(bytes, layout, decoded);
  for (int64_t from = 0; from < 1000; from += 256) {
    const int64_t count = std::min<int64_t>(256, 1000 - from);
    const auto largest = x.narrow(0, from, count).abs().max().item<double>();
    CHECK(
        difference(x.narrow(0, from, count), decoded.narrow(0, from, count)) <=
        largest / 127 / 2 * 1.0001);
  }
  CHECK(torch::equal(decoded.narrow(0, 512, 256), torch::zeros({256})));
  CHECK(difference(decoded + error, x) < 1e-6);
}

TEST_CASE("Int8Compress averages, and all ranks have the same bits", "[int8][ranks][many]") {
  const int world = GENERATE(1, 2, 3);
  const auto dtype = GENERATE(torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16);
  for (const auto& options : all_kinds(64)) {
    for (const int64_t values : {1, 3, 1000}) {
      const auto gradient = [&](int rank) { return draw_values({values}, 10 + rank, dtype); };
      const auto seen = run_ranks<at::Tensor>(world, [&](const Rank& self) {
        return averaged(ddp::hooks::int8_compress(options, self.group), gradient(self.rank));
      });
      auto mean = torch::zeros({values}, torch::kDouble);
      for (int rank = 0; rank < world; ++rank) mean += gradient(rank).to(torch::kDouble) / world;
      CAPTURE(world, dtype, values, static_cast<int>(options.per()));
      CHECK(seen[0].scalar_type() == dtype);
      for (const auto& values_of_rank : seen) CHECK(torch::equal(values_of_rank, seen[0]));
      // Half a step of each quantization; a step of the widest range is 8 / 127.
      CHECK(difference(seen[0].to(torch::kDouble), mean) < 0.065);
    }
  }
}

// The second element is half a step of a rank in each step, or lost by the mean's scale.
TEST_CASE("Int8Compress sends later what quantization lost", "[int8][ranks]") {
  const bool is_lost_by_mean = GENERATE(false, true);
  const auto sums = [&](bool feeds_back) {
    return run_ranks<at::Tensor>(2, [&](const Rank& self) {
      const auto hook =
          ddp::hooks::int8_compress(Int8Options().error_feedback(feeds_back), self.group);
      // Shares are of 4 values.
      const auto gradient =
          is_lost_by_mean
              ? (self.rank == 0 ? torch::tensor({127.0, 1.0, 0.0, 0.0, 1.0, 0.0, 127.0, 0.0})
                                : torch::tensor({254.0, 0.0, 0.0, 0.0, 0.0, 0.0, 254.0, 0.0}))
              : torch::tensor({127.0, 0.25, 0.0, 0.0, 0.25, 0.0, 127.0, 0.0});
      auto sum = torch::zeros({8});
      for (int step = 0; step < 60; ++step) sum += averaged(hook, gradient.to(torch::kFloat));
      return sum;
    });
  };
  const auto with = sums(true);
  CHECK(torch::equal(with[0], with[1]));
  const double expected = 60 * (is_lost_by_mean ? 0.5 : 0.25);
  for (const int64_t i : {1, 4}) {
    CHECK(std::abs(with[0][i].item<double>() - expected) <= 3);
    CHECK(sums(false)[0][i].item<double>() == 0);
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

TEST_CASE("Int8Compress sends half of bfloat16's bytes, on any number of ranks", "[int8][pure]") {
  const int world = GENERATE(2, 3, 64);
  const auto backend = c10::make_intrusive<CountingBackend>(0, world);
  const auto group = group_over(backend);
  constexpr int64_t kValues = 1'000'000;
  averaged(ddp::hooks::int8_compress({}, group), torch::ones({kValues}));
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
  for (const auto& options : all_kinds(8)) {
    const auto seen = run_ranks<at::Tensor>(2, [&](const Rank& self) {
      auto gradient = torch::ones({64}, dtype);
      if (self.rank == 1) gradient[40] = value;
      return averaged(ddp::hooks::int8_compress(options, self.group), gradient);
    });
    CAPTURE(value, static_cast<int>(options.per()));
    for (const auto& found : seen) {
      CHECK_FALSE(found[40].isfinite().item<bool>());
      const bool is_whole = options.per() == Quantization::Tensor;
      CHECK(found.isfinite().sum().item<int64_t>() == (is_whole ? 0 : 56));
    }
  }
}

TEST_CASE("Int8Compress trains as without a hook", "[int8][ranks]") {
  constexpr int kSteps = 150;
  const auto last_loss = [](const std::vector<double>& losses) {
    double sum = 0;
    for (int i = kSteps - 50; i < kSteps; ++i) sum += losses[static_cast<size_t>(i)] / 50;
    return sum;
  };
  const auto run = [&](bool has_hook, const Int8Options& options) {
    return run_ranks<std::vector<double>>(2, [&](const Rank& self) {
      return losses_of(
          self, has_hook ? ddp::hooks::int8_compress(options, self.group) : nullptr, kSteps);
    });
  };
  const auto plain = last_loss(run(false, {})[0]);
  CHECK(plain < 0.1);
  for (const auto per : {Quantization::Block, Quantization::Tensor}) {
    const auto seen = run(true, Int8Options().per(per));
    CHECK(seen[0].back() == seen[1].back());  // the sum of parameters
    const auto loss = last_loss(seen[0]);
    CAPTURE(plain, loss);
    CHECK(std::abs(loss / plain - 1) < 0.03);
  }
}

TEST_CASE("Int8Compress continues from a checkpoint as if uninterrupted", "[int8][ranks]") {
  const TemporaryFolder folder;
  const auto gradient = draw_values({100}, 3, torch::kFloat);
  const auto ends = [&](bool is_resumed) {
    return run_ranks<at::Tensor>(2, [&](const Rank& self) {
      Int8Compress hook({}, self.group);
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
  const auto anew = run_ranks<at::Tensor>(2, [&](const Rank& self) {
    return averaged(ddp::hooks::int8_compress({}, self.group), gradient);
  });
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

TEST_CASE("Int8Compress in a join sends the error of ranks without input", "[int8][ranks][many]") {
  const auto ends = run_ranks<at::Tensor>(3, [&](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8));
    set_waves(*net);
    ddp::DistributedDataParallel model(
        net,
        ddp::DistributedDataParallelOptions().process_group(self.group).bucket_cap_mb_list({1e-4}));
    model->register_comm_hook(ddp::hooks::int8_compress({}, self.group));
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
