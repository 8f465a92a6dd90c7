// Whether a process has stopped, for worlds one of whose ranks stops itself.
#pragma once

#include <sys/types.h>

#include <fstream>
#include <string>

namespace ddp::testing {

/// The program's name must have no space.
inline bool is_stopped(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string field;
  stat >> field >> field >> field;
  return field == "T";
}

}  // namespace ddp::testing
