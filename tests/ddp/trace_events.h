// The events in a trace file of LibTorch's profiler.
#pragma once

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

namespace ddp::testing {

struct TraceEvent {
  std::string kind;  // "cuda_runtime", "cpu_op", "user_annotation", ...
  std::string name;
  double begin_us = 0;
  double end_us = 0;
};

/// The value after `"key": ` in a line, without quotes; "" where the key is missing.
inline std::string value_of(const std::string& line, const std::string& key) {
  const auto at = line.find("\"" + key + "\": ");
  if (at == std::string::npos) return "";
  auto begin = at + key.size() + 4;
  const bool quoted = line[begin] == '"';
  if (quoted) ++begin;
  return line.substr(begin, line.find_first_of(quoted ? "\"" : ",}", begin) - begin);
}

/// Reads the events that have a beginning and an end. Kineto writes an event's kind and name in one
/// line, and its times in the next.
inline std::vector<TraceEvent> read_trace(const std::string& path) {
  std::ifstream file(path);
  std::vector<TraceEvent> events;
  std::string line, next;
  while (std::getline(file, line)) {
    if (value_of(line, "ph") != "X" || !std::getline(file, next)) continue;
    const auto ts = value_of(next, "ts"), dur = value_of(next, "dur");
    if (ts.empty() || dur.empty()) continue;
    const double begin = std::stod(ts);
    events.push_back(
        {value_of(line, "cat"), value_of(line, "name"), begin, begin + std::stod(dur)});
  }
  return events;
}

/// The events of `kinds` that begin within the named range.
inline std::vector<TraceEvent> within(
    const std::vector<TraceEvent>& events, const std::string& range,
    const std::vector<std::string>& kinds) {
  const auto is_range = [&](const TraceEvent& e) {
    return e.name == range && e.kind.rfind("gpu", 0) != 0;
  };
  const auto found = std::find_if(events.begin(), events.end(), is_range);
  if (found == events.end()) return {};
  std::vector<TraceEvent> inside;
  for (const auto& e : events) {
    const bool wanted = std::find(kinds.begin(), kinds.end(), e.kind) != kinds.end();
    if (wanted && e.begin_us >= found->begin_us && e.begin_us <= found->end_us) inside.push_back(e);
  }
  return inside;
}

}  // namespace ddp::testing
