// Runs a program for what it prints.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace ddp::profiling {

struct ProgramOutput {
  std::string text;
  std::string error;  // "" where the program ended by exit(0)
};

/// Runs a program that is found as a shell finds it, with no input, and waits until it ends. Kills
/// it at the deadline. Its messages for people are lost.
ProgramOutput output_of(
    const std::vector<std::string>& command, std::chrono::steady_clock::time_point deadline);

}  // namespace ddp::profiling
