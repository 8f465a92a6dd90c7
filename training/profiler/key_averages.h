// Sums up events by name. Pure.
#pragma once

#include <string>
#include <vector>

#include <ddp/profiler.h>

#include "events.h"

namespace ddp::profiling {

/// \param events  the output of build_tree().
/// \param device  whose kernels were also recorded: "CUDA"; "" for none.
KeyAverages average_by_key(
    const std::vector<FunctionEvent>& events, bool group_by_input_shape, bool profile_memory,
    const std::string& device);

/// Prints shapes as Python does: [[4, 8], []].
std::string text_of_shapes(const std::vector<std::vector<int64_t>>& shapes);

/// Prints Python's table of the entries, in this order. \param row_limit  -1: all.
std::string table_of(
    const KeyAverages& averages, const std::vector<const KeyAverages::Entry*>& entries,
    int row_limit);

}  // namespace ddp::profiling
