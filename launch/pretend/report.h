// A report on lists of calls, as text and as JSON.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "launch/pretend/call_list.h"
#include "launch/pretend/order_check.h"
#include "launch/pretend/replay.h"
#include "launch/pretend/settings.h"
#include "launch/pretend/steps.h"

namespace ddp::launch {

struct CallsReport {
  std::vector<CallList> lists;
  std::vector<StepOfList> steps;  // by list: the one that is measured
  std::vector<OrderFault> faults;
  Chain chain;
  std::optional<double> step_seconds;  // of the slowest rank; unset: without links, or with faults
  std::vector<double> seconds_of_ranks;  // by list
};

/// Checks the order of the ranks' calls, and measures their last whole step.
CallsReport make_report(std::vector<CallList> lists, const std::optional<Links>& links);

/// Tables of memory and calls for each rank, and the faults.
std::string text_of(const CallsReport& report);

/// Bytes and milliseconds: an object of one rank, or with "ranks" of several.
std::string json_of(const CallsReport& report);

/// An object of a job that failed: its exit code, and the faults.
std::string json_of_failed(const CallsReport& report, int exit_code);

/// One line for each fault.
std::vector<std::string> lines_of_faults(const std::vector<OrderFault>& faults);

}  // namespace ddp::launch
