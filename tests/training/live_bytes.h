// How many bytes of CPU tensors live at most while something runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace ddp::testing {

/// Counts what this thread allocates, and the backward passes that it starts, from its
/// construction.
class LiveBytes : public c10::MemoryReportingInfoBase {
 public:
  int64_t peak() const { return peak_; }

  void reportMemoryUsage(
      void* /*ptr*/, int64_t alloc_size, size_t /*total_allocated*/, size_t /*total_reserved*/,
      c10::Device /*device*/) override {
    live_ += alloc_size;
    peak_ = std::max(peak_, live_);
  }
  bool memoryProfilingEnabled() const override { return true; }

 private:
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

/// The peak above what was there before `run()`.
template <typename Run>
int64_t peak_bytes_of(const Run& run) {
  const auto bytes = std::make_shared<LiveBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, bytes);
  run();
  return bytes->peak();
}

}  // namespace ddp::testing
