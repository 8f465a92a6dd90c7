#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "base/environment.h"

namespace ddp {

/// Looks a variable up. Nothing if it is not set, or empty.
std::optional<Setting> read_variable(const Lookup& lookup, const std::string& name);
/// The first of them that is set; null pointers are skipped.
template <typename Names>
std::optional<Setting> first_variable(const Lookup& lookup, const Names& names) {
  for (const auto* name : names) {
    auto setting = name != nullptr ? read_variable(lookup, name) : std::nullopt;
    if (setting) return setting;
  }
  return std::nullopt;
}
inline std::optional<Setting> first_variable(
    const Lookup& lookup, std::initializer_list<const char*> names) {
  return first_variable<std::initializer_list<const char*>>(lookup, names);
}

/// The number that a value begins with, after a colon: 2 of "2", of "1:2" (a range of hosts) and of
/// "2(x3)" (SLURM's 2 on each of 3 hosts). 0: there is none.
int number_in(const std::string& value);

/// Remedy for the PET_* variables, by which Kubeflow gives torchrun its options.
constexpr const char* kDdprunTakesPet =
    "Run ddprun ./train in each pod: it takes the PET_* variables as its options.";

/// Other processes or hosts of this job, of which no launcher speaks.
struct ProcessSigns {
  std::string problem;  // the text of an error: there are some. Empty: none is known
  std::string doubt;    // the text of a warning: there may be some
};

/// Looks for variables by which a system that runs one command on several hosts or pods says so.
///
/// Such a command is meant to be a launcher. A program in its place would train alone on each of
/// them, and all would write to one folder.
ProcessSigns read_process_signs(const Lookup& lookup);

}  // namespace ddp
