// The parsers of outside input, each as a function of some bytes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ddp::fuzz {

struct Target {
  std::string name;  // its corpus is corpus/<name>
  /// Catches the library's errors for bad bytes; if anything else is thrown, the program has a
  /// defect.
  void (*run)(std::string_view bytes);
};

const std::vector<Target>& targets();

}  // namespace ddp::fuzz
