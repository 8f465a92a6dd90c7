// The order of a CapturedStep, with a device that only counts; on a GPU: cuda_graph_test.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <ddp/captured_step.h>
#include <ddp/internal/groups.h>
#include <ddp/optim.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/ranks.h"
#include "training/captured_step/capture_sequence.h"

#include "support/catch.h"

namespace ddp {
namespace {

using testing::error_of;

/// A log of what happens to the device and in the step.
using Log = std::vector<std::string>;

class LoggingDevice : public GraphDevice {
 public:
  explicit LoggingDevice(Log& log) : log_(log) {}
  void check_stream() override {}
  void begin_capture() override { log_.emplace_back("begin"); }
  void end_capture() override { log_.emplace_back("end"); }
  void discard_capture() noexcept override { log_.emplace_back("discard"); }
  void replay() override { log_.emplace_back("replay"); }
  void reset() noexcept override { log_.emplace_back("reset"); }

 private:
  Log& log_;
};

/// Records what optimizers do to lists of tensors, with its numbers, and repeats it, as a graph
/// does.
class RecordingDevice : public GraphDevice {
 public:
  void check_stream() override {}
  void begin_capture() override {
    calls().clear();
    recording_ = at::addGlobalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function) {
          const std::string name = function.name();
          const bool is_recorded = name.find("aten::_fused_") == 0 || name == "aten::_foreach_add_";
          const auto inputs = function.inputs();
          if (is_recorded) {
            calls().push_back(
                {*function.operator_name(),
                 std::vector<c10::IValue>(inputs.begin(), inputs.end())});
          }
          return std::unique_ptr<at::ObserverContext>();
        })
            .needsInputs(true)
            .scopes({at::RecordScope::FUNCTION}));
  }
  void end_capture() override { at::removeCallback(recording_); }
  void discard_capture() noexcept override {}
  void replay() override {
    const torch::NoGradGuard no_grad;
    for (const auto& [name, inputs] : calls()) {
      auto stack = inputs;
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str())
          .callBoxed(stack);
    }
  }
  void reset() noexcept override { calls().clear(); }

 private:
  struct Call {
    c10::OperatorName name;
    std::vector<c10::IValue> inputs;
  };
  static std::vector<Call>& calls() {
    static std::vector<Call> instance;
    return instance;
  }

  at::CallbackHandle recording_ = 0;
};

/// A parameter with a gradient, an optimizer of it, and its captured step.
template <typename Optimizer, typename Options>
struct SteppedParameter {
  explicit SteppedParameter(const Options& options)
      : parameter(torch::tensor({1.0F, -2.0F, 3.0F}).requires_grad_()),
        optimizer({parameter}, options),
        captured(
            [this] {
              optimizer.step();
              return parameter.detach();
            },
            CapturedStepOptions().optimizers({&optimizer}), std::make_unique<RecordingDevice>()) {
    parameter.mutable_grad() = torch::tensor({0.3F, 0.2F, -0.1F});
  }

  void set_rate(double rate) { optimizer.param_groups()[0].options().set_lr(rate); }

  at::Tensor parameter;
  Optimizer optimizer;
  CaptureSequence captured;
};

/// A step that this device captures runs as well, so the one without a graph has one more.
template <typename Optimizer, typename Options>
void check_rates_of_replays(Options options) {
  SteppedParameter<Optimizer, Options> replayed(options), eager(options);
  std::vector<double> rates{0.5, 0.5, 0.5, 0.5, 0.25, 0.125, 0.0625};
  for (const auto rate : rates) {
    replayed.set_rate(rate);
    replayed.captured.run();
  }
  rates.insert(rates.begin(), 0.5);
  for (const auto rate : rates) {
    eager.set_rate(rate);
    eager.optimizer.step();
  }
  CHECK(replayed.captured.is_captured());
  CHECK(torch::equal(replayed.parameter, eager.parameter));
}

CaptureSequence make_sequence(Log& log, CapturedStep::Step step) {
  return {std::move(step), CapturedStepOptions(), std::make_unique<LoggingDevice>(log)};
}

}  // namespace

TEST_CASE("a step warms up, is captured once, and is then replayed", "[captured]") {
  Log log;
  const auto result = torch::ones({1});
  {
    auto step = make_sequence(log, [&] {
      log.emplace_back("step");
      return result;
    });
    for (int i = 0; i < 5; ++i) {
      CHECK(step.is_captured() == (i > 3));
      CHECK(step.run().is_same(result));
    }
  }
  CHECK(log == Log{"step", "step", "step", "begin", "step", "end", "replay", "replay", "reset"});
}

TEST_CASE(
    "a step that cannot be captured is refused with the operation's name", "[captured][errors]") {
  Log log;
  int steps = 0;
  auto step = make_sequence(log, [&] {
    if (++steps > 3) {
      const auto value = torch::ones({1}).item<float>();
      TORCH_CHECK(false, "operation not permitted when stream is capturing: ", value);
    }
    return torch::ones({1});
  });
  for (int i = 0; i < 3; ++i) step.run();
  CHECK_THAT(
      error_of<c10::Error>([&] { step.run(); }),
      ContainsText("failed in aten::") && ContainsText("not permitted when stream is capturing"));
  CHECK(log == Log{"begin", "discard", "reset"});
  CHECK_THAT(
      error_of<c10::Error>([&] { step.run(); }),
      ContainsText("got one that has none because its step cannot be captured"));
}

TEST_CASE("a graph is released before a group ends", "[captured]") {
  Log log;
  auto step = make_sequence(log, [] { return torch::ones({1}); });
  for (int i = 0; i < 4; ++i) step.run();
  log.clear();
  run_before_shutdown();
  CHECK(log == Log{"reset"});
  CHECK_THAT(
      error_of<c10::Error>([&] { step.run(); }), ContainsText("since a process group has ended"));
}

TEST_CASE("what cannot be captured is refused when the step is made", "[captured][errors]") {
  const auto made_with = [](const CapturedStepOptions& options) {
    return error_of<c10::ValueError>(
        [&] { const CapturedStep step([] { return torch::ones({1}); }, options); });
  };
  torch::nn::Linear net(2, 2);
  torch::optim::AdamW adamw(net->parameters());
  torch::optim::SGD sgd(net->parameters(), 0.1);
  CHECK(made_with(CapturedStepOptions().optimizers({&sgd})) == "");
  CHECK_THAT(
      made_with(CapturedStepOptions().optimizers({&sgd, &adamw})),
      ContainsText("got torch::optim::AdamW, which counts steps on the host"));
  CHECK_THAT(
      made_with(CapturedStepOptions().warmup_steps(2)),
      ContainsText("at least 3 warmup_steps, got 2"));
  CHECK_THAT(
      error_of<c10::ValueError>([] { const CapturedStep step(nullptr); }),
      ContainsText("got an empty one"));
}

TEST_CASE("replays of fused optimizers take the rates of a schedule", "[captured]") {
  check_rates_of_replays<optim::AdamW>(torch::optim::AdamWOptions(0.5));
  check_rates_of_replays<optim::Adam>(torch::optim::AdamOptions(0.5).amsgrad(true));
  check_rates_of_replays<optim::Adagrad>(torch::optim::AdagradOptions(0.5));
  check_rates_of_replays<optim::SGD>(torch::optim::SGDOptions(0.5).momentum(0.5));
}

TEST_CASE("a step beside replays takes its rate, and goes on from their counts", "[captured]") {
  using Options = torch::optim::AdamOptions;
  SteppedParameter<optim::Adam, Options> replayed(Options(0.5)), eager(Options(0.5));
  for (int i = 0; i < 4; ++i) replayed.captured.run();
  replayed.set_rate(0.25);
  replayed.optimizer.step();
  replayed.captured.run();
  for (const auto rate : {0.5, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25}) {
    eager.set_rate(rate);
    eager.optimizer.step();
  }
  CHECK(torch::equal(replayed.parameter, eager.parameter));
}

TEST_CASE(
    "a replay refuses options and states that its graph does not have", "[captured][errors]") {
  using AdamOptions = torch::optim::AdamOptions;
  using SgdOptions = torch::optim::SGDOptions;
  SteppedParameter<torch::optim::SGD, SgdOptions> sgd(SgdOptions(0.5).momentum(0.5));
  SteppedParameter<optim::Adam, AdamOptions> adam(AdamOptions(0.5));
  for (int i = 0; i < 5; ++i) {
    sgd.captured.run();
    adam.captured.run();
  }
  const auto before = sgd.parameter.detach().clone();
  sgd.set_rate(0.25);
  CHECK_THAT(
      error_of<c10::Error>([&] { sgd.captured.run(); }),
      ContainsText("got lr = 0.25 in place of 0.5 in group 0") &&
          ContainsText("Take an optimizer of ddp::optim"));
  CHECK(torch::equal(sgd.parameter, before));
  sgd.set_rate(0.5);
  sgd.captured.run();

  auto& options = static_cast<AdamOptions&>(adam.optimizer.param_groups()[0].options());
  options.betas({0.8, 0.999});
  CHECK_THAT(
      error_of<c10::Error>([&] { adam.captured.run(); }),
      ContainsText("got betas = 0.8 in place of 0.9"));
  options.betas({0.9, 0.999});
  adam.captured.run();
  std::stringstream file;
  torch::save(adam.optimizer, file);
  torch::load(adam.optimizer, file);
  CHECK_THAT(
      error_of<c10::Error>([&] { adam.captured.run(); }),
      ContainsText("Make a new CapturedStep after loading"));
}

TEST_CASE("a captured step looks into ZeRO at the optimizer that steps", "[captured][ranks]") {
  const auto errors = testing::run_ranks<std::string>(2, [](const testing::Rank& self) {
    DistributedDataParallel<torch::nn::Linear> model(
        torch::nn::Linear(2, 2), DistributedDataParallelOptions().process_group(self.group));
    ZeroRedundancyOptimizer<torch::optim::AdamW> on_host(model, torch::optim::AdamWOptions());
    ZeroRedundancyOptimizer<optim::AdamW> fused(model, torch::optim::AdamWOptions(0.5));
    const auto step = [] { return torch::ones({1}); };
    auto text = error_of<c10::ValueError>([&] {
      const CapturedStep captured(step, CapturedStepOptions().optimizers({&fused, &on_host}));
    });
    auto* local = dynamic_cast<FusedOptimizer*>(&fused.local_optimizer());
    TORCH_CHECK(local != nullptr, "expected the fused optimizer of this rank's part");
    fused.param_groups()[0].options().set_lr(0.25);
    TORCH_CHECK(fused.local_optimizer().param_groups()[0].options().get_lr() == 0.25);
    return text;
  });
  CHECK_THAT(errors[1], ContainsText("got torch::optim::AdamW, which counts steps on the host"));
}

TEST_CASE("a captured step refuses ZeRO with offload", "[captured][ranks]") {
  const auto errors = testing::run_ranks<std::string>(1, [](const testing::Rank& self) {
    DistributedDataParallel<torch::nn::Linear> model(
        torch::nn::Linear(2, 2), DistributedDataParallelOptions().process_group(self.group));
    ZeroRedundancyOptimizer<optim::AdamW> offloaded(
        model, torch::optim::AdamWOptions(), ZeroOptions().offload_file("/tmp/ddp-state"));
    return error_of<c10::ValueError>([&] {
      const CapturedStep captured(
          [] { return torch::ones({1}); }, CapturedStepOptions().optimizers({&offloaded}));
    });
  });
  CHECK_THAT(errors[0], ContainsText("got a ZeroRedundancyOptimizer with offload"));
}

}  // namespace ddp
