#include "key_averages.h"

#include <algorithm>
#include <functional>
#include <map>

#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>

namespace ddp {
namespace profiling {
namespace {

// Returns, for each event, the time of the kernels that it or its callees launched.
std::vector<double> device_times(const std::vector<FunctionEvent>& events) {
  std::vector<double> times(events.size(), 0);
  // Children come after their parents, so this goes backwards.
  for (size_t i = events.size(); i-- > 0;) {
    const auto& event = events[i];
    if (!event.on_cpu()) {
      times[i] = event.elapsed_us();
      continue;
    }
    for (const double kernel : event.kernels_us) times[i] += kernel;
    double below = 0;
    for (const size_t child : event.children) below += times[child];
    times[i] += below;
  }
  return times;
}

void add_cpu(
    KeyAverages::Entry& entry, const FunctionEvent& event, const std::vector<FunctionEvent>& all) {
  entry.cpu_memory_usage += event.cpu_memory;
  entry.device_memory_usage += event.device_memory;
  if (!event.on_cpu()) return;
  entry.cpu_time_total += event.elapsed_us();
  if (event.is_async) return;
  int64_t cpu_memory = 0;
  int64_t device_memory = 0;
  for (const size_t child : event.children) {
    cpu_memory += all[child].cpu_memory;
    device_memory += all[child].device_memory;
  }
  entry.self_cpu_time_total += self_cpu_us(event, all);
  entry.self_cpu_memory_usage += event.cpu_memory - cpu_memory;
  entry.self_device_memory_usage += event.device_memory - device_memory;
}

void add_device(
    KeyAverages::Entry& entry, const FunctionEvent& event, size_t index,
    const std::vector<double>& times) {
  if (event.is_async) return;
  entry.device_time_total += times[index];
  double called_us = 0;
  for (const size_t child : event.children) called_us += times[child];
  entry.self_device_time_total += times[index] - called_us;
}

}  // namespace

KeyAverages average_by_key(
    const std::vector<FunctionEvent>& events, bool group_by_input_shape, bool profile_memory,
    const std::string& device) {
  KeyAverages averages;
  averages.profile_memory = profile_memory;
  averages.device = device;
  const auto times = device.empty() ? std::vector<double>{} : device_times(events);
  using Key = std::tuple<std::string, c10::DeviceType, bool, std::string>;
  std::map<Key, size_t> entry_of;
  for (size_t i = 0; i < events.size(); ++i) {
    const auto& event = events[i];
    const Key key{
        event.name, event.device_type, event.is_user_annotation,
        group_by_input_shape ? text_of_shapes(event.shapes) : ""};
    const auto [found, is_new] = entry_of.emplace(key, averages.entries.size());
    if (is_new) {
      auto& entry = averages.entries.emplace_back();
      entry.name = event.name;
      entry.device_type = event.device_type;
      entry.is_user_annotation = event.is_user_annotation;
      entry.is_async = event.is_async;
      if (group_by_input_shape) entry.input_shapes = event.shapes;
    }
    auto& entry = averages.entries[found->second];
    ++entry.count;
    add_cpu(entry, event, events);
    if (!device.empty()) add_device(entry, event, i, times);
  }
  return averages;
}

}  // namespace profiling

namespace {

using EntryNumber = std::function<double(const KeyAverages::Entry&)>;

template <typename T>
EntryNumber number_of(T KeyAverages::Entry::*member) {
  return [member](const KeyAverages::Entry& entry) { return static_cast<double>(entry.*member); };
}

const std::map<std::string, EntryNumber>& sort_keys() {
  using Entry = KeyAverages::Entry;
  static const std::map<std::string, EntryNumber> kKeys = {
      {"count", number_of(&Entry::count)},
      {"cpu_time", [](const Entry& entry) { return entry.cpu_time(); }},
      {"device_time", [](const Entry& entry) { return entry.device_time(); }},
      {"cpu_time_total", number_of(&Entry::cpu_time_total)},
      {"self_cpu_time_total", number_of(&Entry::self_cpu_time_total)},
      {"device_time_total", number_of(&Entry::device_time_total)},
      {"self_device_time_total", number_of(&Entry::self_device_time_total)},
      {"cpu_memory_usage", number_of(&Entry::cpu_memory_usage)},
      {"self_cpu_memory_usage", number_of(&Entry::self_cpu_memory_usage)},
      {"device_memory_usage", number_of(&Entry::device_memory_usage)},
      {"self_device_memory_usage", number_of(&Entry::self_device_memory_usage)}};
  return kKeys;
}

const EntryNumber& sort_key(const std::string& sort_by) {
  auto name = sort_by;
  const auto cuda = name.find("cuda");
  if (cuda != std::string::npos) name.replace(cuda, 4, "device");
  const auto found = sort_keys().find(name);
  if (found == sort_keys().end()) {
    std::string known;
    for (const auto& [key, number] : sort_keys()) known += (known.empty() ? "" : ", ") + key;
    DDP_CHECK_VALUE(
        false, "KeyAverages::table: expected sort_by to be one of ", known, ", got \"", sort_by,
        "\". Pass \"\" for the order of the first calls.");
  }
  return found->second;
}

}  // namespace

std::string KeyAverages::table(const std::string& sort_by, int row_limit) const {
  std::vector<const Entry*> sorted;
  for (const auto& entry : entries) sorted.push_back(&entry);
  if (!sort_by.empty()) {
    const auto& number = sort_key(sort_by);
    std::stable_sort(sorted.begin(), sorted.end(), [&](const Entry* a, const Entry* b) {
      return number(*a) > number(*b);
    });
  }
  return profiling::table_of(*this, sorted, row_limit);
}

const KeyAverages::Entry* KeyAverages::find(const std::string& name) const {
  const auto found = find_if(entries, [&](const Entry& entry) { return entry.name == name; });
  return found == entries.end() ? nullptr : &*found;
}

}  // namespace ddp
