// Code that is both run and printed: a program that failed is printed as the C++ that ran.
#pragma once

#include <fstream>
#include <map>
#include <memory>
#include <string>

namespace ddp::differential {

/// The texts of the types and functions that programs use, by name.
inline std::map<std::string, std::string>& sources() {
  static std::map<std::string, std::string> all;
  return all;
}
struct Source {
  Source(const char* name, const char* text) { sources()[name] = text; }
};

/// Defines the code, and keeps its text under the name. (The text is what the preprocessor leaves:
/// in one line, with macros as they were written.)
#define DDP_SOURCE(name, ...) \
  __VA_ARGS__;                \
  inline const Source name##_source(#name, #__VA_ARGS__)

/// The statements that one rank has run, a line each, as they come: what crashes has said all
/// before.
class Trace {
 public:
  Trace() = default;
  explicit Trace(const std::string& path) : file_(std::make_shared<std::ofstream>(path)) {}

  void say(const std::string& statement) {
    if (file_) *file_ << statement << std::endl;
  }
  /// That what follows uses a type or function of sources().
  void use(const std::string& source) { say("#use " + source); }
  /// That another run begins, on so many ranks.
  void begin(int ranks) { say("#ranks " + std::to_string(ranks)); }

 private:
  std::shared_ptr<std::ofstream> file_;
};

/// Runs code, and says it.
#define DDP_DO(trace, ...)         \
  do {                             \
    (trace).say(#__VA_ARGS__ ";"); \
    __VA_ARGS__;                   \
  } while (false)

}  // namespace ddp::differential
