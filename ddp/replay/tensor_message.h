#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace ddp {

/// Tensors as bytes on the host, which another rank makes tensors of: with the same sizes, strides
/// and place in a cache line, since kernels may add up in another order for others.
class TensorMessage {
 public:
  /// \throws c10::ValueError  for a tensor without plain memory: sparse, quantized, a lazy
  /// conjugate.
  void add(const at::Tensor& tensor);
  /// The sizes, strides and dtypes, for a receiver.
  std::string layout() const;
  /// One tensor on the host.
  at::Tensor bytes() const;

  /// \param layout  of the sender.
  static int64_t size_of(const std::string& layout);
  /// \param bytes  as of bytes().
  /// \param device  of those that were on a device other than the host.
  static std::vector<at::Tensor> read(
      const std::string& layout, const at::Tensor& bytes, c10::Device device);

 private:
  std::vector<std::string> layouts_;
  std::vector<at::Tensor> parts_;
};

}  // namespace ddp
