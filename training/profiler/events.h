// Turns LibTorch's recorded events into events that contain each other. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>

namespace ddp::profiling {

/// An event that LibTorch recorded: a call, a kernel, or memory that was allocated or freed.
struct RawEvent {
  std::string name;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  uint64_t start_thread = 0;
  uint64_t end_thread = 0;
  uint64_t correlation_id = 0;
  uint64_t linked_correlation_id = 0;  // of the call that launched this one; 0: none
  int64_t bytes = 0;                   // of "[memory]": negative when freed
  c10::DeviceType device_type = c10::DeviceType::CPU;
  bool is_async = false;
  bool is_hidden = false;
  bool is_user_annotation = false;
  bool is_backward = false;  // a node of autograd, and not what it calls
  std::vector<std::vector<int64_t>> shapes;
  int64_t sequence_number = -1;  // the same for a node of autograd and the call that made it
  uint64_t forward_thread = 0;   // of that call; 0 unless is_backward
  std::vector<std::string> stack;
};

struct RawEvents {
  int64_t start_ns = 0;
  std::vector<RawEvent> events;
};

/// A call or a kernel. Times are microseconds since the recording began.
struct FunctionEvent {
  static constexpr size_t kNone = static_cast<size_t>(-1);

  std::string name;
  uint64_t id = 0;
  uint64_t thread = 0;
  double start_us = 0;
  double end_us = 0;
  c10::DeviceType device_type = c10::DeviceType::CPU;
  bool is_async = false;
  bool is_user_annotation = false;
  bool is_backward = false;
  std::vector<std::vector<int64_t>> shapes;
  int64_t sequence_number = -1;
  uint64_t forward_thread = 0;
  std::vector<std::string> stack;  // the innermost frame first
  int64_t cpu_memory = 0;
  int64_t device_memory = 0;
  std::vector<double> kernels_us;  // of the kernels that it launched, its children excluded
  size_t parent = kNone;
  std::vector<size_t> children;

  bool on_cpu() const { return device_type == c10::DeviceType::CPU; }
  double elapsed_us() const { return end_us - start_us; }
};

/// Returns the events of a recording, sorted by their beginnings, each with its memory and kernels.
std::vector<FunctionEvent> function_events(const RawEvents& recorded);

/// Sets parents and children of events that are sorted by their beginnings: on one thread, an event
/// is the parent of those within its interval. Removes an only child that has the name of its
/// parent.
void build_tree(std::vector<FunctionEvent>& events);

/// Microseconds of an event of build_tree()'s without its children; 0 if it is a kernel or async.
double self_cpu_us(const FunctionEvent& event, const std::vector<FunctionEvent>& all);

}  // namespace ddp::profiling
