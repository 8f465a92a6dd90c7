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

/// What a call depends on besides its arguments, as it is now on this thread: the random numbers
/// that come next, and autocast.
class CallContext {
 public:
  /// \param devices  with random numbers of their own, beside the CPU.
  CallContext(const std::vector<c10::Device>& devices, bool with_random_numbers);

  /// Puts it back for its scope.
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
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  std::vector<std::pair<c10::DeviceType, at::ScalarType>> autocast_;  // where it is enabled
};

}  // namespace ddp
