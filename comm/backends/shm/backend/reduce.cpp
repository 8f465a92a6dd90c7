#include "reduce.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

namespace ddp::backends::shm {
namespace {

using c10d::ReduceOp;

// Elements that are combined before the next source is read, so that their accumulators stay in the
// first level cache.
constexpr size_t kBlock = 2048;

// Whole numbers wrap around, as in torch.
template <typename T, bool is_integral = std::is_integral_v<T>>
struct Arithmetic {
  using Type = T;
};
template <typename T>
struct Arithmetic<T, true> {
  using Type = std::make_unsigned_t<decltype(T() + T())>;
};

struct Sum {
  template <typename T>
  static T combine(T a, T b) {
    using Wide = typename Arithmetic<T>::Type;
    return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
  }
};
// A sum of parts that are divided before they are added, so that it overflows only if the average
// does; to the bit the result of ranks that divide their own tensors.
struct Average : Sum {};
struct Product {
  template <typename T>
  static T combine(T a, T b) {
    using Wide = typename Arithmetic<T>::Type;
    return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
  }
};
// As in torch, a NaN stays a NaN.
struct Min {
  template <typename T>
  static T combine(T a, T b) {
    return b < a || b != b ? b : a;
  }
};
struct Max {
  template <typename T>
  static T combine(T a, T b) {
    return b > a || b != b ? b : a;
  }
};
struct And {
  template <typename T>
  static T combine(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <typename T>
  static T combine(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <typename T>
  static T combine(T a, T b) {
    return a ^ b;
  }
};

template <typename T>
struct AccumulatorOf {
  using Type = T;
};
template <>
struct AccumulatorOf<c10::Half> {
  using Type = float;
};
template <>
struct AccumulatorOf<c10::BFloat16> {
  using Type = float;
};

struct Job {
  const std::vector<const std::byte*>& sources;
  const std::vector<std::byte*>& destinations;
  size_t begin;
  size_t end;
  double share;  // multiplies each source in an average
};

template <typename T>
const T* at(const std::byte* memory, size_t element) {
  return reinterpret_cast<const T*>(memory) + element;
}

template <typename T, typename Op>
void reduce_block(const Job& job, size_t first, size_t count) {
  using Accumulator = typename AccumulatorOf<T>::Type;
  const auto share = static_cast<Accumulator>(job.share);
  const auto part = [=](T element) {
    const auto wide = static_cast<Accumulator>(element);
    // Rounded, as by a rank that divides before it sends.
    if constexpr (std::is_same_v<Op, Average>) {
      return static_cast<Accumulator>(static_cast<T>(wide * share));
    }
    return wide;
  };
  std::array<Accumulator, kBlock> sums;
  const T* source = at<T>(job.sources[0], first);
  for (size_t i = 0; i < count; ++i) sums[i] = part(source[i]);
  for (size_t s = 1; s < job.sources.size(); ++s) {
    source = at<T>(job.sources[s], first);
    for (size_t i = 0; i < count; ++i) {
      sums[i] = Op::template combine<Accumulator>(sums[i], part(source[i]));
    }
  }

  std::array<T, kBlock> rounded;
  const T* result = nullptr;
  if constexpr (std::is_same_v<T, Accumulator>) {
    result = sums.data();
  } else {
    for (size_t i = 0; i < count; ++i) rounded[i] = static_cast<T>(sums[i]);
    result = rounded.data();
  }
  for (std::byte* destination : job.destinations) {
    std::memcpy(destination + first * sizeof(T), result, count * sizeof(T));
  }
}

template <typename T, typename Op>
void reduce_all(const Job& job) {
  for (size_t first = job.begin; first < job.end; first += kBlock) {
    reduce_block<T, Op>(job, first, std::min(kBlock, job.end - first));
  }
}

template <typename T>
void reduce_as(ReduceOp::RedOpType op, const Job& job) {
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::BAND) return reduce_all<T, And>(job);
    if (op == ReduceOp::BOR) return reduce_all<T, Or>(job);
    if (op == ReduceOp::BXOR) return reduce_all<T, Xor>(job);
  } else {
    if (op == ReduceOp::AVG) return reduce_all<T, Average>(job);
  }
  switch (op) {
    case ReduceOp::SUM:
      return reduce_all<T, Sum>(job);
    case ReduceOp::PRODUCT:
      return reduce_all<T, Product>(job);
    case ReduceOp::MIN:
      return reduce_all<T, Min>(job);
    case ReduceOp::MAX:
      return reduce_all<T, Max>(job);
    default:
      TORCH_INTERNAL_ASSERT(false, "a reduction that can_reduce refuses");
  }
}

}  // namespace

const ReductionTable& reductions() {
  static const ReductionTable table{
      {{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16},
       {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX}},
      {{at::kChar, at::kByte, at::kInt, at::kLong},
       {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX, ReduceOp::BAND,
        ReduceOp::BOR, ReduceOp::BXOR}}};
  return table;
}

bool can_reduce(at::ScalarType type, const ReduceOp& op) { return reductions().has(type, op.op_); }

void reduce_elements(
    at::ScalarType type, const ReduceOp& op, const std::vector<const std::byte*>& sources,
    const std::vector<std::byte*>& destinations, size_t begin, size_t end, double share) {
  const Job job{
      sources, destinations, begin, end,
      share != 0 ? share : 1.0 / static_cast<double>(sources.size())};
  switch (type) {
    case at::kFloat:
      return reduce_as<float>(op.op_, job);
    case at::kDouble:
      return reduce_as<double>(op.op_, job);
    case at::kHalf:
      return reduce_as<c10::Half>(op.op_, job);
    case at::kBFloat16:
      return reduce_as<c10::BFloat16>(op.op_, job);
    case at::kChar:
      return reduce_as<int8_t>(op.op_, job);
    case at::kByte:
      return reduce_as<uint8_t>(op.op_, job);
    case at::kInt:
      return reduce_as<int32_t>(op.op_, job);
    case at::kLong:
      return reduce_as<int64_t>(op.op_, job);
    default:
      TORCH_INTERNAL_ASSERT(false, "a type that can_reduce refuses");
  }
}

}  // namespace ddp::backends::shm
