#include "profiler/stacks/stack_lines.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp::profiling {
namespace {

constexpr std::array<const char*, 5> kMetrics = {
    "self_cpu_time_total", "self_device_time_total", "self_cuda_time_total", "self_xpu_time_total",
    "self_privateuse1_time_total"};

// The node of autograd that an event is or is below; null if there is none.
const FunctionEvent* node_of(const FunctionEvent& event, const std::vector<FunctionEvent>& all) {
  const auto* at = &event;
  while (!at->is_backward) {
    if (at->parent == FunctionEvent::kNone) return nullptr;
    at = &all[at->parent];
  }
  return at;
}

// Without what separates frames, and frames from the number.
std::string one_frame(std::string text) {
  for (char& c : text) {
    if (c == ' ' || c == ';' || c == '\t' || c == '\n') c = '_';
  }
  return text;
}

std::string line_of(const FunctionEvent& event, const std::vector<FunctionEvent>& all) {
  std::string line;
  for (auto frame = event.stack.rbegin(); frame != event.stack.rend(); ++frame) {
    line += one_frame(*frame) + ';';
  }
  const auto* node = node_of(event, all);
  if (node != nullptr && node != &event) line += one_frame(node->name) + ';';
  return line + one_frame(event.name);
}

double self_device_us(const FunctionEvent& event) {
  double us = 0;
  if (event.is_async) return us;
  for (const double kernel : event.kernels_us) us += kernel;
  return us;
}

}  // namespace

void check_stack_metric(const std::string& metric) {
  DDP_CHECK_VALUE(
      std::find(kMetrics.begin(), kMetrics.end(), metric) != kMetrics.end(),
      "Profiler: expected a metric for export_stacks that is one of ", joined_by(", ", kMetrics),
      ", got \"", metric, "\". Leave it out for the time on the CPU.");
}

void take_stacks_of_forward(std::vector<FunctionEvent>& events) {
  // The first call of a number and a thread is the outermost.
  std::map<std::pair<int64_t, uint64_t>, const std::vector<std::string>*> made_by;
  for (const auto& event : events) {
    const bool is_call = event.on_cpu() && event.sequence_number >= 0 && !event.stack.empty();
    if (!is_call || node_of(event, events) != nullptr) continue;
    made_by.try_emplace({event.sequence_number, event.thread}, &event.stack);
  }
  for (auto& event : events) {
    const auto* node = event.on_cpu() ? node_of(event, events) : nullptr;
    if (node == nullptr) continue;
    const auto found = made_by.find({node->sequence_number, node->forward_thread});
    if (found != made_by.end()) event.stack = *found->second;
  }
}

std::string stack_lines(const std::vector<FunctionEvent>& events, const std::string& metric) {
  const bool is_cpu = metric == kMetrics.front();
  std::map<std::string, double> us_of;
  for (const auto& event : events) {
    if (!event.on_cpu()) continue;
    const double us = is_cpu ? self_cpu_us(event, events) : self_device_us(event);
    if (us > 0) us_of[line_of(event, events)] += us;
  }
  std::string lines;
  for (const auto& [line, us] : us_of) {
    const auto whole = static_cast<int64_t>(us);
    if (whole > 0) lines += line + ' ' + std::to_string(whole) + '\n';
  }
  return lines;
}

}  // namespace ddp::profiling
