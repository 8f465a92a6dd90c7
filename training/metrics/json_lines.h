#pragma once

#include <cstddef>
#include <string>

#include "metrics/metric_point.h"

namespace ddp {

/// An object and the end of its line: {"step":3,"time":1700000000.250,"name":"loss","value":0.5}.
/// Values that are not finite are the strings "NaN", "Infinity" and "-Infinity".
///
/// \param point  whose name is UTF-8.
std::string json_line(const MetricPoint& point);

/// How a file is continued whose program may have ended while it wrote a line.
struct LinesRepair {
  bool is_ours = true;     // false: the last line is none of json_line(), so the file is another
  size_t cut = 0;          // bytes to remove from the end: the beginning of a line
  bool needs_end = false;  // the last line is whole, but for its end
};

/// \param tail  the end of a file, at least as much of it as a line has; or all of it.
LinesRepair repair_of_lines(const std::string& tail);

}  // namespace ddp
