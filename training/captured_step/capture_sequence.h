#pragma once

#include <memory>
#include <string>

#include <ddp/captured_step.h>

#include "captured_step/captured_optimizers.h"

namespace ddp {

class GraphDevice {
 public:
  virtual ~GraphDevice() = default;

  /// \throws c10::Error  unless the current stream can capture, and is that of the first call.
  virtual void check_stream() = 0;
  /// Begins after all queued work has ended.
  virtual void begin_capture() = 0;
  virtual void end_capture() = 0;
  /// Ends a capture that cannot be completed.
  virtual void discard_capture() noexcept = 0;
  virtual void replay() = 0;
  /// Destroys the graph after its last replay has ended.
  virtual void reset() noexcept = 0;
};

std::unique_ptr<GraphDevice> make_cuda_graph_device();

/// The order of a CapturedStep: warms up, captures once, replays.
class CaptureSequence {
 public:
  CaptureSequence(
      CapturedStep::Step step, const CapturedStepOptions& options,
      std::unique_ptr<GraphDevice> device);
  ~CaptureSequence();
  C10_DISABLE_COPY_AND_ASSIGN(CaptureSequence);

  at::Tensor run();
  bool is_captured() const { return state_ == State::Captured; }
  /// \param why  a later call throws: "of release()".
  void release(const std::string& why) noexcept;

 private:
  enum class State { WarmingUp, Captured, Released };

  void capture();

  const CapturedStep::Step step_;
  int64_t warmup_left_;
  CapturedOptimizers optimizers_;
  const std::unique_ptr<GraphDevice> device_;
  State state_ = State::WarmingUp;
  std::string released_by_;
  at::Tensor result_;
  std::shared_ptr<void> before_shutdown_;
};

}  // namespace ddp
