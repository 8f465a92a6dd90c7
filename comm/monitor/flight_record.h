// What dump_flight_record() writes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "calls/call_history.h"

namespace ddp {

/// The latest calls of a rank in one group.
struct FlightRecord {
  std::string group;
  int rank = 0, size = 1;
  std::optional<std::string> failure;
  std::vector<CallList> lanes;  // in the order of CallHistory::kLanes
};

/// A JSON document.
std::string to_json(const std::vector<FlightRecord>& records);
/// Lines for people.
std::string to_text(const std::vector<FlightRecord>& records);

class GroupMonitor;
/// Adds a group to what this process dumps, as long as its monitor lives.
void add_to_flight_record(const std::shared_ptr<const GroupMonitor>& monitor);
/// Writes the file that DDP_FLIGHT_RECORD asks for, if it does. Reports nothing: the group's
/// failure matters more.
void dump_flight_record_of_failure(int world_rank) noexcept;

}  // namespace ddp
