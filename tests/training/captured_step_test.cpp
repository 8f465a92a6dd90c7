// The order of a CapturedStep, with a device that only counts; on a GPU: cuda_graph_test.
#include <ddp/captured_step.h>
#include <ddp/internal/before_shutdown.h>
#include <torch/torch.h>

#include "support/error_of.h"
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

}  // namespace ddp
