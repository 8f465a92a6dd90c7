#pragma once

#include <cstddef>
#include <string>

#include "plan/planner.h"

namespace ddp::plan {

/// Tables for people: the `top` fastest plans, and why meshes do not fit.
std::string table_of(const Task&, const Plans&, size_t top);
/// All plans and reasons as a JSON object; bytes and seconds.
std::string json_of(const Task&, const Plans&);

}  // namespace ddp::plan
