// The state that a call depends on besides its arguments, so that a repetition finds the same.
#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <ddp/autocast.h>

namespace ddp {

/// The thread's state: the next random numbers, and autocast.
class CallContext {
 public:
  /// \param devices  devices with generators of their own, in addition to the CPU.
  CallContext(const std::vector<c10::Device>& devices, bool with_random_numbers);

  class Restored {
   public:
    explicit Restored(const CallContext& context);
    ~Restored();
    C10_DISABLE_COPY_AND_ASSIGN(Restored);

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

/// The buffers of a call's modules: what it found in those that it wrote.
class CallBuffers {
 public:
  /// Before the call.
  /// \param statistics  what the call writes and does not read.
  CallBuffers(
      const std::vector<at::Tensor>& buffers, const std::vector<std::string>& names,
      std::vector<at::Tensor> statistics);
  /// After the call: forgets the values of buffers that it did not write.
  void end_call();

  bool has_statistics(const at::Tensor& tensor) const;
  const std::vector<at::Tensor>& statistics() const { return statistics_; }

  /// For its scope, buffers have the values that the call found, and afterwards those of before.
  /// The version numbers as well: operations outside that saved them do not notice.
  class Restored {
   public:
    /// \throws c10::Error  a buffer that the call did not write was changed since.
    explicit Restored(const CallBuffers& call);
    ~Restored();
    C10_DISABLE_COPY_AND_ASSIGN(Restored);

   private:
    struct Before {
      at::Tensor buffer;
      int64_t version;
      at::Tensor value;
    };
    std::vector<Before> before_;
  };

 private:
  struct Found {
    at::Tensor buffer;
    std::string name;
    int64_t version;
    at::Tensor value;  // undefined after a call that did not write it
  };
  std::vector<Found> found_;
  std::vector<at::Tensor> statistics_;
};

}  // namespace ddp
