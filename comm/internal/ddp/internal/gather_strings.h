#pragma once

#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// Waits for a collective in place of its own `wait()`.
using WaitForWork = c10::function_ref<void(c10d::Work& work)>;

/// all_gather_strings() with another WaitPoint.
std::vector<std::string> gather_strings(
    const std::string& text, const ProcessGroup& group, const char* where);

/// all_gather_strings() with another way to wait.
std::vector<std::string> gather_strings(
    const std::string& text, const ProcessGroup& group, WaitForWork wait);

}  // namespace ddp
