#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <ddp/reduction_stats.h>

#include "progress.h"
#include "tally.h"

namespace examples {

/// Prints the line that ends an epoch, which began at `start`.
void report_epoch(
    int64_t epoch, int64_t epochs, const Tally& trained, const Tally& tested,
    std::chrono::steady_clock::time_point start, Progress& progress);

/// Prints that a wrapper's check_replicas() found no difference.
void report_equal_replicas(Progress& progress);

/// Writes the steps of all ranks to one file, if `path` is not empty. Collective: yes.
void write_trace(const std::string& path, const ddp::ReductionStats& own, Progress& progress);

}  // namespace examples
