#include <ddp/captured_step.h>

#include <mutex>
#include <utility>

#include <ATen/record_function.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>

#include "captured_step/capture_sequence.h"

namespace ddp {
namespace {

constexpr int64_t kLeastWarmup = 3;

void check(const CapturedStep::Step& step, const CapturedStepOptions& options) {
  DDP_CHECK_VALUE(step, "CapturedStep: expected a function, got an empty one. Pass the step.");
  DDP_CHECK_VALUE(
      options.warmup_steps() >= kLeastWarmup, "CapturedStep: expected at least ", kLeastWarmup,
      " warmup_steps, got ", options.warmup_steps(), ". In these the buckets find their order.");
}

/// Notes the operator that was started last, on any thread: autograd has its own.
class LastOperator {
 public:
  LastOperator()
      : handle_(at::addGlobalCallback(
            at::RecordFunctionCallback([](const at::RecordFunction& function) {
              note(function.name());
              return std::unique_ptr<at::ObserverContext>();
            }).scopes({at::RecordScope::FUNCTION}))) {
    note("");
  }
  ~LastOperator() { at::removeCallback(handle_); }
  C10_DISABLE_COPY_AND_ASSIGN(LastOperator);

  static std::string name() {
    const std::lock_guard lock(mutex());
    return text();
  }

 private:
  static void note(const char* name) {
    const std::lock_guard lock(mutex());
    text() = name;
  }
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static std::string& text() {
    static std::string instance;
    return instance;
  }

  const at::CallbackHandle handle_;
};

}  // namespace

CaptureSequence::CaptureSequence(
    CapturedStep::Step step, const CapturedStepOptions& options,
    std::unique_ptr<GraphDevice> device)
    : step_(std::move(step)),
      warmup_left_(options.warmup_steps()),
      optimizers_(options.optimizers()),
      device_(std::move(device)) {
  check(step_, options);
}

CaptureSequence::~CaptureSequence() {
  before_shutdown_.reset();
  release("of its end");
}

at::Tensor CaptureSequence::run() {
  DDP_CHECK(
      state_ != State::Released,
      "CapturedStep: expected one with its graph, got one that has none ", released_by_,
      ". Make a new one.");
  device_->check_stream();
  if (warmup_left_ > 0) {
    --warmup_left_;
    return step_();
  }
  if (state_ == State::WarmingUp) capture();
  optimizers_.prepare_replay();
  device_->replay();
  return result_;
}

void CaptureSequence::capture() {
  std::string error;
  std::string last;
  {
    const CapturedOptimizers::Capture rates_on_device(optimizers_);
    device_->begin_capture();
    const LastOperator operators;
    error = problem_of([&] {
      result_ = step_();
      device_->end_capture();
    });
    last = LastOperator::name();
  }
  if (!error.empty()) {
    device_->discard_capture();
    release("because its step cannot be captured");
    DDP_CHECK(
        false, "CapturedStep: expected a step that waits for nothing, got one that failed in ",
        last.empty() ? "its function" : last, ": ", error,
        " Leave out what reads a value on the host, such as item(), a GradScaler or clipping.");
  }
  optimizers_.freeze();
  state_ = State::Captured;
  before_shutdown_ = call_before_shutdown([this] { release("since a process group has ended"); });
}

void CaptureSequence::release(const std::string& why) noexcept {
  if (state_ == State::Released) return;
  state_ = State::Released;
  released_by_ = why;
  device_->reset();
  result_.reset();
}

class CapturedStep::Impl : public CaptureSequence {
 public:
  using CaptureSequence::CaptureSequence;
};

CapturedStep::CapturedStep(Step step, const CapturedStepOptions& options)
    : impl_(std::make_unique<Impl>(std::move(step), options, make_cuda_graph_device())) {}

CapturedStep::~CapturedStep() = default;

at::Tensor CapturedStep::operator()() { return impl_->run(); }

bool CapturedStep::is_captured() const { return impl_->is_captured(); }

void CapturedStep::release() { impl_->release("after release()"); }

}  // namespace ddp
