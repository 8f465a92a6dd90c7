#include "monitor/flight_record.h"

#include <algorithm>
#include <ctime>
#include <fstream>
#include <iomanip>
#include <mutex>

#include <ATen/core/functional.h>
#include <c10/core/ScalarType.h>
#include <ddp/flight_record.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "base/environment.h"

namespace ddp {
namespace {

constexpr const char* kVariable = "DDP_FLIGHT_RECORD";

const char* lane_name(size_t lane) {
  return CallHistory::kLanes[lane] == CallHistory::Lane::kCpu ? "cpu" : "device";
}

std::string call_json(const CallList& list, uint64_t number, const char* lane) {
  const auto& call = list.at(number);
  const auto text_or_null = [](bool is_there, const char* text) {
    return is_there ? json_text(text) : std::string("null");
  };
  return ddp::str(
      "{\"number\": ", number, ", \"device\": \"", lane, "\", \"time_us\": ", list.time_us(number),
      ", \"call\": \"", to_text(call.kind), "\", \"dtype\": ",
      text_or_null(
          call.dtype >= 0,
          c10::toString(static_cast<c10::ScalarType>(std::max<int>(call.dtype, 0)))),
      ", \"tensors\": ", call.tensors, ", \"numel\": ", call.numel, ", \"reduction\": ",
      text_or_null(
          call.reduction >= 0,
          to_text(static_cast<ReductionTable::Op>(std::max<int>(call.reduction, 0)))),
      ", \"root\": ", call.root >= 0 ? ddp::str(call.root) : "null", "}");
}

// "2026-11-25T17:03:04.000123Z".
std::string time_text(int64_t microseconds) {
  constexpr int64_t kSecond = 1'000'000;
  const auto seconds = static_cast<std::time_t>(microseconds / kSecond);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  OutputText text;
  text << std::put_time(&parts, "%Y-%m-%dT%H:%M:%S.") << std::setfill('0') << std::setw(6)
       << microseconds % kSecond << 'Z';
  return text.str();
}

// The groups of this process.
class Registry {
 public:
  static Registry& instance() {
    static auto* registry = new Registry;  // never destroyed, because groups may outlive statics
    return *registry;
  }

  void add(const std::shared_ptr<const GroupMonitor>& monitor) {
    const std::lock_guard lock(mutex_);
    const auto is_gone = [](const auto& weak) { return weak.expired(); };
    monitors_.erase(std::remove_if(monitors_.begin(), monitors_.end(), is_gone), monitors_.end());
    monitors_.push_back(monitor);
  }

  std::vector<FlightRecord> records() const {
    std::vector<std::shared_ptr<const GroupMonitor>> monitors;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& weak : monitors_) {
        if (auto monitor = weak.lock()) monitors.push_back(std::move(monitor));
      }
    }
    return c10::fmap(monitors, [](const auto& monitor) { return monitor->flight_record(); });
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<const GroupMonitor>> monitors_;  // in the order of their making
};

}  // namespace

std::string to_json(const std::vector<FlightRecord>& records) {
  std::string json = "{\"groups\": [";
  const char* separator = "\n";
  for (const auto& record : records) {
    json += ddp::str(
        separator, "{\"name\": ", json_text(record.group), ", \"rank\": ", record.rank,
        ", \"size\": ", record.size,
        ", \"coordinate\": ", record.coordinate.empty() ? "null" : json_text(record.coordinate),
        ", \"failure\": ", record.failure ? json_text(*record.failure) : "null", ", \"calls\": [");
    const char* before = "\n  ";
    for (size_t lane = 0; lane < record.lanes.size(); ++lane) {
      const auto& list = record.lanes[lane];
      for (auto number = list.first; number < list.end(); ++number) {
        json += before + call_json(list, number, lane_name(lane));
        before = ",\n  ";
      }
    }
    json += "]}";
    separator = ",\n";
  }
  return json + "\n]}\n";
}

std::string to_text(const std::vector<FlightRecord>& records) {
  std::string text;
  for (const auto& record : records) {
    text += ddp::str(
        "process group \"", record.group, "\", rank ", record.rank, " of ", record.size,
        record.coordinate.empty() ? "" : ddp::str(" (", record.coordinate, ")"), "\n");
    if (record.failure) text += ddp::str("  failed: ", *record.failure, "\n");
    for (size_t lane = 0; lane < record.lanes.size(); ++lane) {
      const auto& list = record.lanes[lane];
      for (auto number = list.first; number < list.end(); ++number) {
        text += ddp::str(
            "  ", time_text(list.time_us(number)), ' ', lane_name(lane), ' ', number, ' ',
            to_text(list.at(number)), "\n");
      }
    }
  }
  return text;
}

void add_to_flight_record(const std::shared_ptr<const GroupMonitor>& monitor) {
  Registry::instance().add(monitor);
}

void dump_flight_record(const std::string& path) {
  const auto records = Registry::instance().records();
  constexpr std::string_view kJson = ".json";
  const bool is_json = path.size() >= kJson.size() &&
                       path.compare(path.size() - kJson.size(), kJson.size(), kJson) == 0;
  std::ofstream file(path, std::ios::trunc);
  file << (is_json ? to_json(records) : to_text(records));
  file.close();
  DDP_CHECK(
      file, "dump_flight_record: expected to write \"", path,
      "\", but cannot. Give a file in a folder that exists and that this process may write to.");
}

void dump_flight_record_of_failure(int world_rank) noexcept {
  try {
    if (const auto prefix = process_variable(kVariable)) {
      dump_flight_record(ddp::str(*prefix, ".rank", world_rank, ".json"));
    }
  } catch (const std::exception&) {
  }
}

}  // namespace ddp
