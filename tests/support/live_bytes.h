// Measures how many bytes of CPU tensors exist at most while something runs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace ddp::testing {

/// Counts allocations of this thread, and of the backward passes that it starts, from its
/// construction on.
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

/// Counts allocations of all threads: backends free on threads of their own.
class CountingAllocator : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator& base) : base_(base) {}

  c10::DataPtr allocate(size_t bytes) override {
    auto memory = base_.allocate(bytes);
    auto* pointer = memory.get();
    const auto live = live_ += static_cast<int64_t>(bytes);
    auto peak = peak_.load();
    while (peak < live && !peak_.compare_exchange_weak(peak, live)) {
    }
    auto* block = new Block{*this, std::move(memory), static_cast<int64_t>(bytes)};
    return {pointer, block, &CountingAllocator::free, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void forget_all() {
    live_ = 0;
    peak_ = 0;
  }
  void reset_peak() { peak_ = live_.load(); }
  int64_t peak() const { return peak_; }

 private:
  struct Block {
    CountingAllocator& owner;
    c10::DataPtr memory;
    int64_t bytes;
  };
  static void free(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->owner.live_ -= block->bytes;
  }

  c10::Allocator& base_;
  std::atomic<int64_t> live_ = 0;
  std::atomic<int64_t> peak_ = 0;
};

/// Measures the peak of all threads together during its lifetime, above the bytes before it.
class PeakOfAllThreads {
 public:
  PeakOfAllThreads() {
    counting().forget_all();
    c10::SetCPUAllocator(&counting(), kPriority);
  }
  ~PeakOfAllThreads() { c10::SetCPUAllocator(&base(), kPriority); }
  PeakOfAllThreads(const PeakOfAllThreads&) = delete;
  PeakOfAllThreads& operator=(const PeakOfAllThreads&) = delete;

  /// Starts a new measurement: counts bytes that exist now, but not those from before this object.
  void reset() { counting().reset_peak(); }
  int64_t bytes() const { return counting().peak(); }

 private:
  static constexpr uint8_t kPriority = 1;

  static c10::Allocator& base() {
    static auto* allocator = c10::GetCPUAllocator();
    return *allocator;
  }
  // Static, because bytes that outlive this object are freed there.
  static CountingAllocator& counting() {
    static auto* allocator = new CountingAllocator(base());
    return *allocator;
  }
};

/// Returns the peak above the bytes that existed before `run()`.
template <typename Run>
int64_t peak_bytes_of(const Run& run) {
  const auto bytes = std::make_shared<LiveBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, bytes);
  run();
  return bytes->peak();
}

}  // namespace ddp::testing
