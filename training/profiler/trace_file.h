// Trace files: LibTorch prints a line and continues where it cannot write one.
#pragma once

#include <functional>
#include <string>

namespace ddp::profiling {

/// Checks that a trace may be written there, or what `content` names.
///
/// \throws c10::ValueError  the path ends with ".gz", or names something that is no file.
///         c10::Error  with the system's reason.
void check_trace_path(const std::string& path, const char* content = "trace");

/// Replaces a trace by what `write` writes, to a path of its own: of ranks that write to one path
/// at a time, the last one's trace stays, whole.
///
/// \throws c10::Error  the file cannot be made, or is incomplete.
void write_trace(const std::string& path, const std::function<void(const std::string&)>& write);

/// \throws c10::Error  the first file is gone, or the second cannot be written.
void copy_trace(const std::string& from, const std::string& to);

}  // namespace ddp::profiling
