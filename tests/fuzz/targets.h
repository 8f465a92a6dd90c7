// What parses input from outside, each as a function of some bytes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ddp::fuzz {

struct Target {
  std::string name;  // its corpus is corpus/<name>
  /// Returns, or the program has a defect: an error of the library for bad bytes is caught in here.
  void (*run)(std::string_view bytes);
};

const std::vector<Target>& targets();

}  // namespace ddp::fuzz
