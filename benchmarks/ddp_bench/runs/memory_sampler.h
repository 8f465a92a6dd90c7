#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace ddp_bench {

/// The proportional set size of a process (PSS), in bytes: a page of memory that n processes have
/// mapped counts as 1/n of a page.
struct Pss {
  int64_t anonymous = 0;  // malloc, stacks, and pages of mapped files that the process changed
  int64_t shared = 0;     // shared memory
  int64_t file = 0;       // unchanged pages of mapped files: programs and libraries

  /// The memory that depends on this process alone. Pages of libraries are shared with all
  /// processes on the host that have them mapped, also those of other programs.
  int64_t own() const { return anonymous + shared; }
};

/// Parses the text of /proc/PID/smaps_rollup; nothing when one of the three fields is missing.
std::optional<Pss> parse_pss(const std::string& smaps_rollup);

/// Samples the memory of this process from a thread of its own, and keeps the largest sample.
class MemorySampler {
 public:
  /// Takes the first sample. The thread takes one each millisecond, or as fast as the kernel can:
  /// it walks over all pages for one, which takes some milliseconds where there are many.
  ///
  /// \throws c10::Error  where the kernel does not report the PSS.
  MemorySampler();
  ~MemorySampler();
  MemorySampler(const MemorySampler&) = delete;
  MemorySampler& operator=(const MemorySampler&) = delete;

  /// The sample so far whose own() is the largest.
  Pss peak() const;
  /// The latest sample.
  Pss latest() const;
  /// Takes the last sample, and returns the peak.
  Pss stop();

 private:
  void sample();
  void join();

  mutable std::mutex mutex_;  // guards the next three members
  Pss peak_, latest_;
  bool stops_ = false;
  std::condition_variable wakes_;
  std::thread thread_;
};

}  // namespace ddp_bench
