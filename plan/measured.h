// Rates of the model from a pretended run of the job: the report of `ddprun --pretend --json`.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "plan/planner.h"

namespace ddp::plan {

/// One rank's part of a report.
struct MeasuredRank {
  struct Calls {
    std::string axis, kind;
    int64_t ranks = 1, calls = 0;
    double bytes = 0;
  };
  int64_t rank = 0;
  std::map<std::string, double> bytes_at_peak;  // by kind
  std::vector<Calls> calls;                     // of a step
  double compute_ms = 0;
};

struct MeasuredJob {
  int64_t world_size = 1;
  std::vector<MeasuredRank> ranks;
};

/// \param name  of the file, for errors.
/// \throws std::runtime_error  naming the file, the rule and the value.
MeasuredJob parse_measured(const std::string& name, const std::string& json);

/// Fits the model to a run of the task's job in one mesh: the rate of computation, and how many
/// times as much memory and as many bytes the program has as the formulas say. They are then taken
/// for all meshes.
///
/// \throws std::runtime_error  where the run is not of this job.
void fit(Task& task, const MeasuredJob& job);

}  // namespace ddp::plan
