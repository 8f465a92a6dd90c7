#pragma once

#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// Replaces the `wait()` of a collective.
using WaitForWork = c10::function_ref<void(c10d::Work& work)>;

/// all_gather_strings() that reports `where` as its WaitPoint.
std::vector<std::string> gather_strings(
    const std::string& text, const ProcessGroup& group, const char* where);

/// all_gather_strings() that waits for its collectives by `wait`.
std::vector<std::string> gather_strings(
    const std::string& text, const ProcessGroup& group, WaitForWork wait);

}  // namespace ddp
