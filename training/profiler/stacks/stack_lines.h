// Python's export_stacks. Pure.
#pragma once

#include <string>
#include <vector>

#include "profiler/events.h"

namespace ddp::profiling {

/// \throws c10::ValueError  a metric that there is not.
void check_stack_metric(const std::string& metric);

/// Gives the events below a node of autograd the stack of the call that made the node, as Python
/// does. Without such a call they keep theirs.
///
/// \param events  the output of build_tree(); so below.
void take_stacks_of_forward(std::vector<FunctionEvent>& events);

/// A line for each stack and name: "main();train();aten::mm 123", with the microseconds of them
/// all. Between stack and name is the node of autograd, if there is one.
std::string stack_lines(const std::vector<FunctionEvent>& events, const std::string& metric);

}  // namespace ddp::profiling
