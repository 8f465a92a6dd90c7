#include "gradients/gradient_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/mul.h>
#include <ddp/internal/text.h>

#include "gradients/finite_check.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace ddp {
namespace {

// Elements below which a second thread costs more than it saves.
constexpr int64_t kGrain = 32768;

// From so many bytes on, a kernel of its own that multiplies while it copies costs a device less
// than one more pass over the memory.
constexpr size_t kOwnKernel = size_t{4} << 20;

// A block of at least so many bytes is mostly evicted from the caches before it is read.
constexpr size_t kStreamed = size_t{1} << 20;

// at::parallel_for, without its fixed cost for the many small gradients.
template <typename Body>
void for_range(int64_t count, int64_t grain, const Body& body) {
  if (count < grain) {
    body(0, count);
  } else {
    at::parallel_for(0, count, grain, body);
  }
}

// Same memory order in both, without gaps: element k of one is element k of the other.
bool same_dense_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

bool is_plain_cpu(const at::Tensor& t) {
  return t.layout() == at::kStrided && t.device().is_cpu() && !t.is_neg() && !t.is_conj();
}

// Does `body` for parts of [begin, end), and has `check` look at each part's result while it is in
// the first cache.
template <typename T, typename Body>
void in_parts(int64_t begin, int64_t end, const T* result, FiniteCheck* check, const Body& body) {
  constexpr auto kPart = static_cast<int64_t>(16384 / sizeof(T));
  if (check == nullptr) return body(begin, end);
  for (int64_t part = begin; part < end; part += kPart) {
    const auto part_end = std::min(part + kPart, end);
    body(part, part_end);
    check->look(
        c10::CppTypeToScalarType<T>::value, result + part,
        static_cast<size_t>(part_end - part) * sizeof(T));
  }
}

template <typename T>
void multiply(T* dst, const T* src, int64_t count, double scale, FiniteCheck* check) {
  const T factor = static_cast<T>(scale);
  for_range(count, kGrain, [=](int64_t begin, int64_t end) {
    in_parts(begin, end, dst, check, [=](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) dst[i] = src[i] * factor;
    });
  });
}

// Returns false, with nothing done, for layouts or dtypes that need the dispatcher.
bool multiply_in_memory(
    const at::Tensor& dst, const at::Tensor& src, double scale, FiniteCheck* check) {
  if (!is_plain_cpu(dst) || !is_plain_cpu(src) || !same_dense_layout(dst, src)) return false;
  const int64_t count = src.numel();
  switch (src.scalar_type()) {
    case at::kFloat:
      multiply(dst.data_ptr<float>(), src.const_data_ptr<float>(), count, scale, check);
      return true;
    case at::kDouble:
      multiply(dst.data_ptr<double>(), src.const_data_ptr<double>(), count, scale, check);
      return true;
    default:
      return false;
  }
}

bool copy_in_memory(const at::Tensor& dst, const at::Tensor& src) {
  if (!is_plain_cpu(dst) || !is_plain_cpu(src) || !same_dense_layout(dst, src)) return false;
  auto* to = static_cast<char*>(dst.data_ptr());
  const auto* from = static_cast<const char*>(src.const_data_ptr());
  for_range(static_cast<int64_t>(src.nbytes()), kGrain * 4, [=](int64_t begin, int64_t end) {
    const auto bytes = static_cast<size_t>(end - begin);
    if (bytes >= kStreamed) {
      streaming_copy(to + begin, from + begin, bytes);
    } else {
      std::memcpy(to + begin, from + begin, bytes);
    }
  });
  return true;
}

}  // namespace

bool is_like(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == b.layout() && a.scalar_type() == b.scalar_type() &&
         a.device() == b.device() && a.sizes() == b.sizes();
}

std::string kind_difference(const at::Tensor& got, const at::Tensor& expected) {
  std::string text;
  const auto compare = [&](const char* what, const auto& a, const auto& b) {
    if (a != b) text += ddp::str(text.empty() ? "" : ", ", what, a, " instead of ", b);
  };
  compare("", got.scalar_type(), expected.scalar_type());
  compare("on ", got.device(), expected.device());
  compare("layout ", got.layout(), expected.layout());
  compare("shape ", got.sizes(), expected.sizes());
  return text;
}

#ifdef __SSE2__
void streaming_copy(void* to, const void* from, size_t bytes) {
  constexpr size_t kWord = sizeof(__m128i);
  constexpr size_t kWords = 4;  // a cache line
  auto* destination = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const size_t head =
      std::min(bytes, (kWord - reinterpret_cast<uintptr_t>(destination) % kWord) % kWord);
  std::memcpy(destination, source, head);
  size_t done = head;
  for (; done + kWords * kWord <= bytes; done += kWords * kWord) {
    __m128i words[kWords];
    for (size_t i = 0; i < kWords; ++i) {
      words[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + done + i * kWord));
    }
    for (size_t i = 0; i < kWords; ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(destination + done + i * kWord), words[i]);
    }
  }
  std::memcpy(destination + done, source + done, bytes - done);
  _mm_sfence();  // nothing else orders streaming stores, and another process may read the memory
}
#else
void streaming_copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
#endif

void copy_scaled(const at::Tensor& dst, const at::Tensor& src, double scale, FiniteCheck* check) {
  if (src.numel() == 0) return;
  if (scale != 1.0 && multiply_in_memory(dst, src, scale, check)) return;
  if (scale != 1.0) {
    auto out = dst;
    at::mul_out(out, src, at::native::wrapped_scalar_tensor(scale));
  } else if (!copy_in_memory(dst, src)) {
    dst.copy_(src);
  }
  if (check != nullptr) check->look(src);
}

void scale_in_place(const at::Tensor& t, double scale, FiniteCheck* check) {
  if (t.numel() == 0) return;
  if (scale != 1.0 && multiply_in_memory(t, t, scale, check)) return;
  if (scale != 1.0) t.mul_(scale);
  if (check != nullptr) check->look(t);
}

void ScaledCopies::copy(const at::Tensor& dst, const at::Tensor& src) {
  // One pair of other strides would make the whole list copy tensor by tensor.
  const bool has_own_kernel = scale_ != 1.0 && dst.nbytes() >= kOwnKernel;
  if (when_ == When::AtOnce || has_own_kernel || !same_dense_layout(dst, src)) {
    return copy_scaled(dst, src, scale_, check_);
  }
  destinations_.push_back(dst);
  sources_.push_back(src);
  scale(dst);
}

void ScaledCopies::scale(const at::Tensor& t) {
  if (when_ == When::AtOnce) return scale_in_place(t, scale_, check_);
  if (scale_ != 1.0) scaled_.push_back(t);
}

void ScaledCopies::finish() {
  if (!destinations_.empty()) at::_foreach_copy_(destinations_, sources_);
  if (!scaled_.empty()) at::_foreach_mul_(scaled_, scale_);
  destinations_.clear();
  sources_.clear();
  scaled_.clear();
}

}  // namespace ddp
