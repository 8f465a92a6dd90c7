#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace ddp {

/// The values that a forward pass reads beside arguments and parameters: the states of the random
/// generators, and a module's buffers; always in the same order.
std::vector<at::Tensor> surroundings_of(const std::vector<at::Tensor>& buffers, c10::Device device);

/// The autocast of a forward pass.
struct AutocastState {
  struct OfDevice {
    c10::DeviceType device;
    bool is_enabled;
    at::ScalarType dtype;
  };
  std::vector<OfDevice> devices;

  static AutocastState current();
  void set() const;
};

/// While it exists, a call finds the surroundings of another rank; afterwards all is as before,
/// versions of buffers too.
class RepeatScope {
 public:
  /// \param surroundings  of surroundings_of() on that rank.
  RepeatScope(
      const std::vector<at::Tensor>& surroundings, const AutocastState& autocast,
      const std::vector<at::Tensor>& buffers, c10::Device device);
  ~RepeatScope();
  RepeatScope(const RepeatScope&) = delete;
  RepeatScope& operator=(const RepeatScope&) = delete;

 private:
  void restore() const;

  struct Buffer {
    at::Tensor tensor, value;
    int64_t version;
  };
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  std::vector<Buffer> buffers_;
  const AutocastState autocast_;
};

}  // namespace ddp
