#include "gradients/finite_check.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <ATen/Parallel.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/ScalarType.h>
#include <ddp/internal/as_real.h>

namespace ddp {
namespace {

// Numbers between two looks at the result: a loop of a known length has no branch, so that the
// compiler makes vectors of it.
constexpr size_t kBlock = 256;

// A number is infinite or NaN where all bits of its exponent are set.
template <typename Bits>
bool any_full_exponent(const char* numbers, size_t count, Bits exponent) {
  const auto full = [&](size_t i) -> Bits {
    Bits bits;
    std::memcpy(&bits, numbers + i * sizeof(Bits), sizeof(Bits));
    return (bits & exponent) == exponent ? 1 : 0;
  };
  size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    Bits found = 0;
    for (size_t k = 0; k < kBlock; ++k) found |= full(i + k);
    if (found != 0) return true;
  }
  Bits found = 0;
  for (; i < count; ++i) found |= full(i);
  return found != 0;
}

bool any_not_finite(at::ScalarType real, const void* numbers, size_t bytes) {
  const auto* memory = static_cast<const char*>(numbers);
  switch (real) {
    case at::kFloat:
      return any_full_exponent<uint32_t>(memory, bytes / 4, 0x7f800000U);
    case at::kDouble:
      return any_full_exponent<uint64_t>(memory, bytes / 8, 0x7ff0000000000000U);
    case at::kHalf:
      return any_full_exponent<uint16_t>(memory, bytes / 2, 0x7c00U);
    default:
      return any_full_exponent<uint16_t>(memory, bytes / 2, 0x7f80U);  // bfloat16
  }
}

}  // namespace

bool FiniteCheck::knows(at::ScalarType dtype) {
  const auto real = c10::toRealValueType(dtype);
  return real == at::kFloat || real == at::kDouble || real == at::kHalf || real == at::kBFloat16;
}

void FiniteCheck::look(at::ScalarType dtype, const void* numbers, size_t bytes) {
  if (any_not_finite(c10::toRealValueType(dtype), numbers, bytes)) failed_ = true;
}

void FiniteCheck::look(const at::Tensor& tensor) {
  const auto values = tensor.layout() == at::kSparse ? tensor._values() : tensor;
  if (values.numel() == 0) return;
  if (!knows(values.scalar_type()) || !values.is_non_overlapping_and_dense()) {
    if (!at::isfinite(values).all().item<bool>()) failed_ = true;
    return;
  }
  const auto* memory = static_cast<const char*>(values.const_data_ptr());
  const auto size = static_cast<int64_t>(values.element_size());
  at::parallel_for(0, values.numel(), int64_t{1} << 16, [&](int64_t begin, int64_t end) {
    look(values.scalar_type(), memory + begin * size, static_cast<size_t>((end - begin) * size));
  });
}

}  // namespace ddp
