#include "local_sgd/diloco/wire.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

namespace ddp {
namespace {

constexpr int64_t kScaleBytes = 4;
constexpr double kLargest = 127;

int64_t blocks_of(int64_t elements) { return (elements + kWireBlock - 1) / kWireBlock; }

at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.contiguous().view(at::kByte); }

// The blocks' scales, and then one byte an element.
at::Tensor encode_int8(const at::Tensor& values) {
  const int64_t elements = values.numel();
  const int64_t blocks = blocks_of(elements);
  const auto padded =
      at::constant_pad_nd(values, {0, blocks * kWireBlock - elements}).view({blocks, kWireBlock});
  const auto scales = padded.abs().amax(1, /*keepdim=*/true).div_(kLargest);
  // A block of zeros has the scale 0: 0 / 1 is what it has to be.
  const auto divisors = scales.masked_fill(scales == 0, 1);
  const auto numbers = padded.div(divisors).round_().clamp_(-kLargest, kLargest);
  const auto integers = numbers.nan_to_num(0).to(at::kChar).flatten().narrow(0, 0, elements);
  return at::cat({bytes_of(scales.flatten()), bytes_of(integers)});
}

at::Tensor decode_int8(const at::Tensor& bytes, int64_t elements) {
  const int64_t blocks = blocks_of(elements);
  const auto scales = bytes.narrow(0, 0, blocks * kScaleBytes).clone().view(at::kFloat);
  const auto integers = bytes.narrow(0, blocks * kScaleBytes, elements).view(at::kChar);
  const auto padded =
      at::constant_pad_nd(integers.to(at::kFloat), {0, blocks * kWireBlock - elements});
  const auto values = padded.view({blocks, kWireBlock}).mul(scales.view({blocks, 1}));
  return values.flatten().narrow(0, 0, elements).contiguous();
}

}  // namespace

int64_t encoded_bytes(Wire wire, int64_t elements) {
  switch (wire) {
    case Wire::Float32:
      return 4 * elements;
    case Wire::BFloat16:
      return 2 * elements;
    case Wire::Int8:
      return elements + kScaleBytes * blocks_of(elements);
  }
  return 0;
}

at::Tensor encode(Wire wire, const at::Tensor& values) {
  if (wire == Wire::Int8) return encode_int8(values);
  return bytes_of(wire == Wire::BFloat16 ? values.to(at::kBFloat16) : values);
}

at::Tensor decode(Wire wire, const at::Tensor& bytes, int64_t elements) {
  if (wire == Wire::Int8) return decode_int8(bytes, elements);
  const auto dtype = wire == Wire::BFloat16 ? at::kBFloat16 : at::kFloat;
  return bytes.clone().view(dtype).to(at::kFloat);
}

}  // namespace ddp
