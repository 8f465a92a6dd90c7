#pragma once

#include <cstdint>
#include <cstring>

#include <ATen/core/Tensor.h>

namespace ddp {

/// A number that changes, with high probability, when an optimizer steps the parameter: a hash of
/// three of its elements, where the host can read them; else its version, which LibTorch's SGD does
/// not increase, and which operations that change no value do increase.
///
/// Cost: a few nanoseconds; never waits for a device.
inline uint64_t value_sample(const at::Tensor& parameter) {
  const auto version = static_cast<uint64_t>(parameter._version());
  const auto bytes = static_cast<size_t>(parameter.element_size());
  const auto numel = parameter.numel();
  if (!parameter.is_cpu() || numel == 0 || bytes > sizeof(uint64_t)) return version;
  if (!parameter.is_non_overlapping_and_dense()) return version;
  uint64_t sample = 0;
  const auto* data = static_cast<const char*>(parameter.const_data_ptr());
  for (const auto at : {int64_t{0}, numel / 2, numel - 1}) {
    uint64_t element = 0;
    std::memcpy(&element, data + static_cast<size_t>(at) * bytes, bytes);
    sample = (sample ^ element) * 0x9E3779B97F4A7C15u;  // odd: the multiplication is invertible
    sample ^= sample >> 29;
  }
  return sample;
}

}  // namespace ddp
