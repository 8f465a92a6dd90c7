// Trace files: LibTorch prints a line and continues where it cannot write one.
#pragma once

#include <string>

namespace ddp::profiling {

/// Checks that a trace can be written there, and removes a file of that name.
///
/// \throws c10::ValueError  the path ends with ".gz", or names something that is no file.
///         c10::Error  with the system's reason.
void check_trace_path(const std::string& path);

/// \throws c10::Error  the file does not exist, or is incomplete.
void check_trace_file(const std::string& path);

/// \throws c10::Error  the first file is gone, or the second cannot be written.
void copy_trace(const std::string& from, const std::string& to);

}  // namespace ddp::profiling
