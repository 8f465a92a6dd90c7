#include "gradients/streaming_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace ddp {

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

}  // namespace ddp
