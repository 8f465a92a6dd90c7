#include "events.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

#include <c10/util/Type.h>
#include <ddp/internal/text.h>

namespace ddp::profiling {
namespace {

constexpr const char* kMemoryEvent = "[memory]";
constexpr const char* kOutOfMemoryEvent = "[OutOfMemory]";

bool is_excluded(const RawEvent& event) {
  // The profiler's own calls, which Python leaves out as well.
  static constexpr std::array<const char*, 8> kNames = {
      kMemoryEvent,
      kOutOfMemoryEvent,
      "profiler::_record_function_enter",
      "profiler::_record_function_enter_new",
      "profiler::_record_function_exit",
      "aten::is_leaf",
      "aten::output_nr",
      "aten::_version"};
  return event.is_hidden || std::find(kNames.begin(), kNames.end(), event.name) != kNames.end();
}

std::string readable_name(const std::string& name) {
  if (begins_with(name, "ProfilerStep#")) return "ProfilerStep*";
  // c10::demangle would take a single letter for a mangled type.
  return name.size() > 1 ? c10::demangle(name.c_str()) : name;
}

void add_memory(FunctionEvent& event, const RawEvent& record) {
  switch (record.device_type) {
    case c10::DeviceType::CPU:
    case c10::DeviceType::MKLDNN:
    case c10::DeviceType::IDEEP:
      event.cpu_memory += record.bytes;
      break;
    case c10::DeviceType::CUDA:
    case c10::DeviceType::HIP:
    case c10::DeviceType::XPU:
    case c10::DeviceType::PrivateUse1:
      event.device_memory += record.bytes;
      break;
    default:
      break;
  }
}

bool is_kernel(const FunctionEvent& event) {
  return event.device_type == c10::DeviceType::CUDA || event.device_type == c10::DeviceType::XPU ||
         event.device_type == c10::DeviceType::PrivateUse1;
}

/// Allocations and frees, by time.
class MemoryRecords {
 public:
  explicit MemoryRecords(const std::vector<RawEvent>& events) {
    for (const auto& event : events) {
      if (event.name == kMemoryEvent) records_.push_back({&event, false});
    }
    std::stable_sort(records_.begin(), records_.end(), [](const Record& a, const Record& b) {
      return a.event->start_ns < b.event->start_ns;
    });
  }

  // Adds the records of all threads between the two times, as Python does.
  void add_to(FunctionEvent& event, int64_t start_ns, int64_t end_ns) {
    auto record = std::lower_bound(
        records_.begin(), records_.end(), start_ns,
        [](const Record& r, int64_t time) { return r.event->start_ns < time; });
    for (; record != records_.end() && record->event->start_ns <= end_ns; ++record) {
      add_memory(event, *record->event);
      record->is_within_call = true;
    }
  }

  template <typename Body>
  void for_each_outside(const Body& body) const {
    for (const auto& record : records_) {
      if (!record.is_within_call) body(*record.event);
    }
  }

 private:
  struct Record {
    const RawEvent* event;
    bool is_within_call;
  };
  std::vector<Record> records_;
};

// Sorts as Python's lists [start, -end].
bool begins_before(const FunctionEvent& a, const FunctionEvent& b) {
  return std::make_pair(a.start_us, -a.end_us) < std::make_pair(b.start_us, -b.end_us);
}

double microseconds_since(int64_t start_ns, int64_t time_ns) {
  return static_cast<double>(time_ns - start_ns) / 1000;
}

FunctionEvent memory_event(const RawEvent& raw, int64_t start_ns) {
  FunctionEvent event;
  event.name = raw.name;
  event.thread = raw.start_thread;
  event.start_us = event.end_us = microseconds_since(start_ns, raw.start_ns);
  add_memory(event, raw);
  return event;
}

// Assigns kernels to the calls that launched them, and calls of the device's runtime to the thread
// of the operator that made them.
void link_launches(
    std::vector<FunctionEvent>& events, const std::vector<size_t>& operators,
    const std::unordered_map<uint64_t, std::vector<size_t>>& launched_by) {
  for (const size_t index : operators) {
    auto& event = events[index];
    if (!event.on_cpu() || event.is_async) continue;
    const auto launched = launched_by.find(event.id);
    if (launched == launched_by.end()) continue;
    for (const size_t other : launched->second) {
      if (is_kernel(events[other])) {
        event.kernels_us.push_back(events[other].elapsed_us());
      } else if (events[other].on_cpu()) {
        events[other].thread = event.thread;
      }
    }
  }
}

void find_parents(std::vector<FunctionEvent>& events) {
  std::vector<size_t> order;
  for (size_t i = 0; i < events.size(); ++i) {
    if (events[i].on_cpu() && !events[i].is_async) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (events[a].thread != events[b].thread) return events[a].thread < events[b].thread;
    return begins_before(events[a], events[b]);
  });
  std::vector<size_t> open;  // each is within the one before
  for (const size_t index : order) {
    auto& event = events[index];
    if (!open.empty() && events[open.back()].thread != event.thread) open.clear();
    while (!open.empty()) {
      auto& candidate = events[open.back()];
      if (event.start_us < candidate.end_us && event.end_us <= candidate.end_us) {
        candidate.children.push_back(index);
        event.parent = open.back();
        break;
      }
      open.pop_back();
    }
    open.push_back(index);
  }
}

// Merges an only child into its parent of the same name: "aten::sum" calls itself.
std::vector<char> merge_duplicates(std::vector<FunctionEvent>& events) {
  std::vector<char> removed(events.size(), 0);
  for (bool again = true; again;) {
    again = false;
    for (size_t i = 0; i < events.size(); ++i) {
      const size_t parent = events[i].parent;
      if (removed[i] || parent == FunctionEvent::kNone) continue;
      auto& above = events[parent];
      if (above.name != events[i].name || above.children.size() != 1) continue;
      above.children = events[i].children;
      above.kernels_us = events[i].kernels_us;
      for (const size_t child : events[i].children) events[child].parent = parent;
      removed[i] = 1;
      again = true;
    }
  }
  return removed;
}

void erase(std::vector<FunctionEvent>& events, const std::vector<char>& removed) {
  std::vector<size_t> index_now(events.size(), FunctionEvent::kNone);
  size_t kept = 0;
  for (size_t i = 0; i < events.size(); ++i) {
    if (removed[i]) continue;
    index_now[i] = kept;
    if (kept != i) events[kept] = std::move(events[i]);
    ++kept;
  }
  events.resize(kept);
  for (auto& event : events) {
    if (event.parent != FunctionEvent::kNone) event.parent = index_now[event.parent];
    for (auto& child : event.children) child = index_now[child];
  }
}

}  // namespace

std::vector<FunctionEvent> function_events(const RawEvents& recorded) {
  MemoryRecords memory(recorded.events);
  std::vector<FunctionEvent> events;
  std::vector<size_t> operators;
  std::unordered_map<uint64_t, std::vector<size_t>> launched_by;
  for (const auto& raw : recorded.events) {
    if (is_excluded(raw)) continue;
    FunctionEvent event;
    event.name = readable_name(raw.name);
    event.id = raw.correlation_id;
    event.thread = raw.start_thread;
    event.start_us = microseconds_since(recorded.start_ns, raw.start_ns);
    event.end_us = microseconds_since(recorded.start_ns, raw.end_ns);
    event.device_type = raw.device_type;
    event.is_async = raw.is_async || raw.start_thread != raw.end_thread;
    event.is_user_annotation = raw.is_user_annotation;
    event.is_backward = raw.is_backward;
    event.shapes = raw.shapes;
    event.sequence_number = raw.sequence_number;
    event.forward_thread = raw.forward_thread;
    event.stack = raw.stack;
    if (event.on_cpu()) memory.add_to(event, raw.start_ns, raw.end_ns);
    if (raw.linked_correlation_id > 0) {
      launched_by[raw.linked_correlation_id].push_back(events.size());
    } else {
      operators.push_back(events.size());
    }
    events.push_back(std::move(event));
  }
  link_launches(events, operators, launched_by);
  memory.for_each_outside(
      [&](const RawEvent& raw) { events.push_back(memory_event(raw, recorded.start_ns)); });
  for (const auto& raw : recorded.events) {
    if (raw.name == kOutOfMemoryEvent) events.push_back(memory_event(raw, recorded.start_ns));
  }
  std::stable_sort(events.begin(), events.end(), begins_before);
  return events;
}

void build_tree(std::vector<FunctionEvent>& events) {
  find_parents(events);
  erase(events, merge_duplicates(events));
}

double self_cpu_us(const FunctionEvent& event, const std::vector<FunctionEvent>& all) {
  if (!event.on_cpu() || event.is_async) return 0;
  double called_us = 0;
  for (const size_t child : event.children) called_us += all[child].elapsed_us();
  return event.elapsed_us() - called_us;
}

}  // namespace ddp::profiling
