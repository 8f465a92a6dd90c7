#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/reduction_stats.h>

#include "progress.h"
#include "tally.h"

namespace examples {

/// The line that ends an epoch, which began at `start`.
void report_epoch(
    int64_t epoch, int64_t epochs, const Tally& trained, const Tally& tested,
    std::chrono::steady_clock::time_point start, Progress& progress);

/// \throws c10::Error  when parameters differ between ranks by a bit. Collective: yes.
void check_replicas(const std::vector<at::Tensor>& parameters, Progress& progress);

/// Writes the steps of all ranks to one file, where `path` names one. Collective: yes.
void write_trace(const std::string& path, const ddp::ReductionStats& own, Progress& progress);

}  // namespace examples
