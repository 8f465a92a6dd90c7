#pragma once

#include <memory>
#include <string>

#include <ddp/captured_step.h>

#include "captured_step/captured_optimizers.h"
#include "captured_step/graph_device.h"

namespace ddp {

/// The order of a CapturedStep: warms up, captures once, replays.
class CaptureSequence {
 public:
  CaptureSequence(
      CapturedStep::Step step, const CapturedStepOptions& options,
      std::unique_ptr<GraphDevice> device);
  ~CaptureSequence();
  CaptureSequence(const CaptureSequence&) = delete;
  CaptureSequence& operator=(const CaptureSequence&) = delete;

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
