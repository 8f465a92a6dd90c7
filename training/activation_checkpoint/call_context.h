#pragma once

#include <list>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <ddp/autocast.h>

namespace ddp {

/// The thread's state on which a call depends besides its arguments: the next random numbers, and
/// autocast.
class CallContext {
 public:
  /// \param devices  devices with generators of their own, in addition to the CPU.
  CallContext(const std::vector<c10::Device>& devices, bool with_random_numbers);

  /// Restores the state for its scope.
  class Restored {
   public:
    explicit Restored(const CallContext& context);
    ~Restored();
    Restored(const Restored&) = delete;
    Restored& operator=(const Restored&) = delete;

   private:
    std::vector<std::pair<at::Generator, at::Tensor>> generators_before_;
    std::list<AutocastGuard> autocast_;
  };

 private:
  bool has_noted(const at::Generator& generator) const;

  bool with_random_numbers_;
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  std::vector<std::pair<c10::DeviceType, at::ScalarType>> autocast_;  // where it is enabled
};

}  // namespace ddp
