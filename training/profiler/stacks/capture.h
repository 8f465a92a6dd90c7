// Where operators are called from, noted while a recording runs.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include <ATen/record_function.h>
#include <c10/macros/Macros.h>

namespace ddp::profiling {

/// Return addresses, the innermost call's first.
using Addresses = std::vector<void*>;

/// While one exists, each operator and range of its thread, and of this thread's backward passes,
/// has the number of its stack as its debug handle, which LibTorch's profiler keeps. Without one
/// nothing is registered. At most one exists, as of recordings.
class StackCapture {
 public:
  /// Begins on this thread. Construct it before LibTorch's profiler begins, whose callback reads
  /// the numbers.
  StackCapture();
  /// Ends. Call it on the same thread; elsewhere, the callback that stays does nothing.
  ~StackCapture();
  C10_DISABLE_COPY_AND_ASSIGN(StackCapture);

  /// The stacks so far, each once, by number.
  std::vector<Addresses> stacks() const;

 private:
  const std::thread::id thread_ = std::this_thread::get_id();
  at::CallbackHandle callback_;
};

}  // namespace ddp::profiling
