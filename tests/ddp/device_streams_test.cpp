// What runs on streams, on a device that runs nothing before it is waited for: a missing wait, or
// memory that is freed too early, shows as NaN.
#include <ddp/collectives.h>
#include <ddp/int8_compress.h>
#include <ddp/internal/reducer.h>
#include <ddp/power_sgd.h>
#include <ddp/top_k.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/StreamGuard.h>

#include "reducer/passes.h"
#include "reducer/status/status_agreement.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/toy_device.h"

#include "support/catch.h"

namespace ddp {
namespace {

namespace toy = testing::toy;

const c10::Device kToy(at::kPrivateUse1, 0);
const c10::Device kOtherToy(at::kPrivateUse1, 1);

/// Makes `id` the current stream of the device; nothing on the CPU.
std::unique_ptr<c10::StreamGuard> on(c10::StreamId id, c10::Device device) {
  if (device.is_cpu()) return nullptr;
  return std::make_unique<c10::StreamGuard>(toy::stream(id, device.index()));
}

/// A model of matrices and vectors that is trained over echo_group().
struct Trained {
  std::vector<c10::Device> devices{kToy};  // of the parameters, in turns
  c10::StreamId wraps_on = 7;
  c10::StreamId trains_on = 7;
  int ranks = 2;
  int steps = 4;
  ReducerOptions options = ReducerOptions().stats_every(0).bucket_cap_mb_list({1e-6});
  std::function<void(Reducer&, const ProcessGroup&)> prepare;
  std::function<void(Reducer&)> after_step;

  /// \return  the parameters after the last step.
  std::vector<at::Tensor> run() const {
    const std::vector<std::vector<int64_t>> sizes{{8, 8}, {5}, {16, 8}, {8, 8}, {3}, {32, 4}};
    const auto device_of = [&](size_t i) { return devices[i % devices.size()]; };
    auto wrapping = streams(wraps_on);
    std::vector<NamedParameter> parameters;
    std::vector<at::Tensor> inputs;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const auto values = torch::linspace(-1, 1 + double(i), c10::multiply_integers(sizes[i]));
      const auto p = values.view(sizes[i]).to(device_of(i)).requires_grad_();
      parameters.push_back({"p" + std::to_string(i), p});
      inputs.push_back(values.cos().view(sizes[i]).to(device_of(i)));
    }
    const auto group = toy::echo_group(ranks);
    Reducer reducer(parameters, group, options);
    if (prepare) prepare(reducer, group);
    wrapping.clear();
    // What the program waits for itself, when it changes to another stream.
    for (const auto d : devices) {
      if (!d.is_cpu()) toy::Device::get().synchronize({d.index(), wraps_on});
    }
    const auto training = streams(trains_on);
    std::vector<at::Tensor> grads;
    for (int step = 0; step < steps; ++step) {
      for (const auto& p : parameters) p.tensor.mutable_grad().reset();
      testing::reduced_backward(reducer, [&] {
        at::Tensor loss;
        for (size_t i = 0; i < parameters.size(); ++i) {
          const auto y = parameters[i].tensor * inputs[i];
          const auto part = (y * y + y).sum().to(device_of(0));
          loss = loss.defined() ? loss + part : part;
        }
        return loss;
      });
      const torch::NoGradGuard no_grad;
      for (const auto& p : parameters) {
        if (p.tensor.grad().defined()) p.tensor.sub_(p.tensor.grad(), 0.1);
      }
      if (after_step) after_step(reducer);
    }
    std::vector<at::Tensor> values;
    for (const auto& p : parameters) values.push_back(toy::on_host(p.tensor));
    return values;
  }

 private:
  std::vector<std::unique_ptr<c10::StreamGuard>> streams(c10::StreamId id) const {
    std::vector<std::unique_ptr<c10::StreamGuard>> guards;
    for (const auto device : devices) guards.push_back(on(id, device));
    return guards;
  }
};

std::vector<at::Tensor> on_cpu(Trained training) {
  training.devices = {at::kCPU};
  return training.run();
}

}  // namespace

TEST_CASE("gradients are right on the stream that trains", "[streams]") {
  Trained training;
  training.options.gradient_as_bucket_view(GENERATE(false, true));
  training.options.lazy_bucket_allocation(GENERATE(false, true));
  training.wraps_on = GENERATE(7, 0, 8);  // 8: another stream adds up the gradients
  CHECK(testing::all_equal(training.run(), on_cpu(training)));
}

TEST_CASE("lazy buckets stay for the stream that reads them", "[streams]") {
  Trained training;
  training.options.lazy_bucket_allocation(true);
  training.options.gradient_as_bucket_view(GENERATE(false, true));
  training.wraps_on = 8;  // where they are allocated
  training.after_step = [](Reducer&) { toy::Device::get().synchronize({0, 8}); };
  const auto trained = training.run();
  training.after_step = nullptr;
  CHECK(testing::all_equal(trained, on_cpu(training)));
}

TEST_CASE("a model on two devices trains on any streams of theirs", "[streams]") {
  Trained training;
  training.devices = {kToy, kOtherToy};
  training.trains_on = training.wraps_on = GENERATE(0, 7);
  CHECK(testing::all_equal(training.run(), on_cpu(training)));
}

TEST_CASE("memory of a collective stays for the stream that waits for it", "[streams]") {
  const auto group = toy::echo_group();
  auto x = torch::arange(12.0).view({3, 4}).to(kToy);
  const auto expected = toy::on_host(x) * 2;
  auto turned = x.t();  // which goes as a copy
  {
    const auto launches = on(7, kToy);
    auto work = all_reduce_async(turned, c10d::ReduceOp::SUM, group);
    const auto waits = on(8, kToy);
    work->wait();
  }
  toy::Device::get().synchronize({0, 7});  // where the copy was allocated
  const auto waits = on(8, kToy);
  CHECK(torch::equal(toy::on_host(x), expected));
}

TEST_CASE("compressed gradients are right on streams", "[streams]") {
  Trained training;
  training.steps = 6;
  const std::string name = GENERATE(
      "power_sgd", "top_k", "int8", "int8 of channels", "fp8", "fp16", "power_sgd in fp16");
  const bool together = GENERATE(false, true);
  CAPTURE(name, together);
  if (together) training.options.bucket_cap_mb_list({1.0});
  training.prepare = [&](Reducer& reducer, const ProcessGroup& group) {
    const auto power_sgd = [&] {
      return hooks::power_sgd(
          hooks::PowerSGDOptions().start_iter(2).min_compression_rate(1), group);
    };
    reducer.register_comm_hook(
        name == "power_sgd" ? power_sgd()
        : name == "top_k"   ? hooks::top_k(hooks::TopKOptions().ratio(0.25), group)
        : name == "int8"    ? hooks::int8_compress({}, group)
        : name == "fp8"     ? hooks::fp8_compress({}, group)
        : name == "int8 of channels"
            ? hooks::int8_compress(
                  hooks::Int8Options().block(16).per(hooks::Quantization::Channel), group)
        : name == "fp16" ? hooks::fp16_compress(group)
                         : hooks::fp16_compress_wrapper(power_sgd()));
  };
  CHECK(testing::all_equal(training.run(), on_cpu(training)));
}

TEST_CASE("a gradient on a device that is not finite is named", "[streams][nonfinite]") {
  Trained training;
  training.ranks = GENERATE(1, 2);
  training.options.find_nonfinite(true).gradient_as_bucket_view(GENERATE(false, true));
  CHECK(testing::all_equal(training.run(), on_cpu(training)));
  int passes = 0;
  training.after_step = [&](Reducer& reducer) {
    if (++passes == 2) reducer.parameters()[2].tensor.fill_(3e38);
  };
  const auto error = testing::error_of([&] { training.run(); });
  CHECK_THAT(error, ContainsText("in backward pass 3, got inf or NaN, first for \"p2\""));
  CHECK(passes == 1 + training.ranks);  // of two ranks, the host learns of it in the next pass
}

TEST_CASE("a sharded bucket is filled while the one before is reduced", "[streams][zero]") {
  Trained training;
  training.steps = 3;
  std::shared_ptr<GradientShards> shards;
  std::vector<at::Tensor> averages;
  int64_t bytes = 0;
  training.prepare = [&](Reducer& reducer, const ProcessGroup&) {
    shards = reducer.shard_gradients();
    bytes = reducer.stats().bucket_bytes;
  };
  training.after_step = [&](Reducer&) {
    for (auto& shard : *shards) averages.push_back(toy::on_host(shard.average));
    release(*shards);
  };
  auto& device = toy::Device::get();
  device.forget();
  training.run();
  const auto of_device = std::exchange(averages, {});
  constexpr int64_t kLargest = 32 * 4 * 4;
  CHECK(bytes == 2 * kLargest);
  // All but the first reduction of a pass begin while the one before is on its way.
  CHECK(std::count(device.echo_busy.begin(), device.echo_busy.end(), false) == training.steps);
  on_cpu(training);
  CHECK(testing::all_equal(of_device, averages));
}

TEST_CASE("the times of a step on a device make the host wait for nothing", "[streams][stats]") {
  auto& device = toy::Device::get();
  std::vector<StepStats> steps;
  const auto waits_of_first_step = [&](int64_t every) {
    Trained training;
    training.options.stats_every(every);
    device.forget();
    std::vector<int> waits;
    training.prepare = [&](Reducer&, const ProcessGroup&) { device.forget(); };
    training.after_step = [&](Reducer& reducer) {
      waits.push_back(device.host_waits + device.polls);
      steps = reducer.stats().steps;
      // Asking has waited for nothing either.
      waits.push_back(device.host_waits + device.polls);
    };
    training.run();
    CHECK(waits[1] == waits[0]);
    return waits[0];
  };
  const auto without = waits_of_first_step(0);
  CHECK(waits_of_first_step(1) == without);
  REQUIRE_FALSE(steps.empty());
  for (const auto& step : steps) {
    CAPTURE(step.step);
    CHECK(step.forward_ms > 0);
    CHECK(step.compute_ms > step.forward_ms);
    CHECK(step.total_ms > step.compute_ms);
    CHECK((step.step == 1) == (step.step_ms == 0));
    CHECK(step.step_ms >= (step.step == 1 ? 0 : step.total_ms));
    CHECK(step.communication_ms > 0);
    CHECK(step.communication_ms <= step.total_ms);
    CHECK(step.exposed_ms <= step.communication_ms);
    for (const auto& bucket : step.buckets) {
      CHECK(bucket.ready_ms > 0);
      CHECK(bucket.launched_ms >= bucket.ready_ms);
      CHECK(bucket.done_ms > bucket.launched_ms);
      CHECK(bucket.done_ms <= step.total_ms);
    }
  }
}

TEST_CASE("the times of a step hold up no stream of the pool", "[streams][stats]") {
  auto& device = toy::Device::get();
  device.forget();
  Trained training;
  training.options.stats_every(1);
  training.run();
  const auto waits_of = [&](c10::StreamId id) {
    return std::count(device.waits.begin(), device.waits.end(), id);
  };
  CHECK(waits_of(toy::kPoolStream) == 0);
  CHECK(waits_of(toy::kNewStream) > training.steps);  // one a bucket
}

TEST_CASE("a status keeps its pinned memory and its events", "[streams][status]") {
  auto& device = toy::Device::get();
  device.forget();
  constexpr int kPasses = 9;
  constexpr uint64_t kTracked = 3;
  const auto used_in = [](int pass) {
    std::vector<char> used(kTracked);
    for (size_t p = 0; p < kTracked; ++p) used[p] = static_cast<char>(pass >> p & 1);
    return used;
  };
  StatusAgreement status(/*rank=*/0, /*ranks=*/2, kTracked, /*defers=*/true);
  status.use_own_collective(kToy);
  std::vector<std::vector<char>> unused;
  std::optional<StatusAgreement::PendingSum> before;
  int waits = 0;
  const auto read = [&] {
    while (!before->is_ready()) continue;  // each question lets the device do a piece of work
    unused.push_back(before->read().unused);
  };
  for (int pass = 0; pass < kPasses; ++pass) {
    // A rank reads a sum when it has sent its next status.
    status.write(uint64_t{1}, used_in(pass));
    auto pending = status.fetch();
    if (before) read();
    before = std::move(pending);
    waits += device.host_waits;
  }
  read();
  CHECK(device.pinned_made == 2);
  CHECK(device.events_made == 2);
  CHECK(waits == 0);
  REQUIRE(unused.size() == kPasses);
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto used = used_in(pass);
    for (size_t p = 0; p < kTracked; ++p) CHECK(unused[size_t(pass)][p] != used[p]);
  }
  // Sums that nobody fetches or reads keep their memory.
  status.write(uint64_t{1}, used_in(1));
  status.write(uint64_t{1}, used_in(2));
  const auto kept = status.fetch();
  for (int pass = 3; pass < 6; ++pass) {
    status.write(uint64_t{1}, used_in(pass));
    status.fetch();
  }
  CHECK(kept.read().unused == std::vector<char>{1, 0, 1});
}

}  // namespace ddp
