// Code that is both run and printed: a program that failed is printed as the C++ that ran.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace ddp::differential {

/// The texts of the types and functions that programs use, by name.
inline std::map<std::string, std::string>& sources() {
  static std::map<std::string, std::string> all;
  return all;
}
struct Source {
  Source(const char* name, const char* text) { sources()[name] = text; }
};

/// Defines the code, and keeps its text under the name. (The text is what the preprocessor leaves: in one
/// line, with macros as they were written.)
#define DDP_SOURCE(name, ...) \
  __VA_ARGS__;                \
  inline const Source name##_source(#name, #__VA_ARGS__)

/// The statements that one rank has run.
class Trace {
 public:
  void say(const std::string& statement) {
    if (on) lines.push_back(statement);
  }
  void use(const std::string& source) {
    if (on) used.push_back(source);
  }

  bool on = false;
  std::vector<std::string> lines;
  std::vector<std::string> used;  ///< names of sources(), in the order of their first use
};

/// Runs code, and says it.
#define DDP_DO(trace, ...)     \
  do {                         \
    (trace).say(#__VA_ARGS__); \
    __VA_ARGS__;               \
  } while (false)

}  // namespace ddp::differential
