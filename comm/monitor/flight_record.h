// The record of latest calls that dump_flight_record() writes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "calls/call_history.h"

namespace ddp {

struct FlightRecord {
  std::string group;
  int rank = 0, size = 1;
  std::string coordinate = {};  // of the rank in a mesh: "dp 1, tp 0"; "" without one
  std::optional<std::string> failure = {};
  std::vector<CallList> lanes = {};  // in the order of CallHistory::kLanes
};

std::string to_json(const std::vector<FlightRecord>& records);
/// Lines for people.
std::string to_text(const std::vector<FlightRecord>& records);

class GroupMonitor;
/// Registers a group for this process's record, until its monitor is destroyed.
void add_to_flight_record(const std::shared_ptr<const GroupMonitor>& monitor);
/// Writes the file of this rank if DDP_FLIGHT_RECORD is set. Ignores errors, because the group's
/// failure matters more.
void dump_flight_record_of_failure(int world_rank) noexcept;

}  // namespace ddp
