#pragma once

#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

namespace ddp {

/// The optimizers of a captured step. A graph repeats the numbers of their options and the memory
/// of their states, except for learning rates that fused optimizers read from the device.
class CapturedOptimizers {
 public:
  /// \throws c10::ValueError  a null pointer, or an optimizer whose step computes on the host.
  explicit CapturedOptimizers(std::vector<torch::optim::Optimizer*> optimizers);

  /// Makes fused optimizers read their rates from the device, for its lifetime.
  class Capture {
   public:
    explicit Capture(CapturedOptimizers& owner);
    ~Capture() { owner_.end_capture(); }
    C10_DISABLE_COPY_AND_ASSIGN(Capture);

   private:
    CapturedOptimizers& owner_;
  };

  /// Notes what the graph repeats. Call it after the capture.
  void freeze();

  /// Brings the rates on the device up to date.
  ///
  /// \throws c10::Error  something that the graph repeats has changed.
  void prepare_replay();

 private:
  /// The numbers that the steps of an optimizer's group read on the host.
  struct Frozen {
    std::vector<std::pair<const char*, double>> numbers;  // with their names in Python
    const void* state;  // of the first parameter that has one: loading replaces all
  };

  void begin_capture();
  void end_capture() noexcept;
  static std::vector<Frozen> frozen(torch::optim::Optimizer& optimizer);

  std::vector<torch::optim::Optimizer*> optimizers_;
  std::vector<std::vector<Frozen>> frozen_;  // by optimizer and group
};

}  // namespace ddp
