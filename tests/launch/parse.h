// A command line of ddprun, and what it was read as.
#pragma once

#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "launch/options.h"

namespace ddp::testing {

using PetVariables = std::map<std::string, std::string>;

struct Parse {
  explicit Parse(const std::vector<std::string>& words, const PetVariables& variables = {}) {
    std::vector<const char*> argv = {"ddprun"};
    for (const auto& word : words) argv.push_back(word.c_str());
    std::ostringstream out_stream;
    std::ostringstream err_stream;
    const auto parsed = launch::parse_options(
        static_cast<int>(argv.size()), argv.data(), out_stream, err_stream,
        [&](const std::string& name) {
          const auto found = variables.find(name);
          return found == variables.end() ? nullptr : found->second.c_str();
        });
    accepted = parsed.options.has_value();
    if (accepted) options = *parsed.options;
    exit_code = parsed.exit_code;
    out = out_stream.str();
    err = err_stream.str();
  }
  bool accepted;
  launch::LaunchOptions options;
  int exit_code;
  std::string out;
  std::string err;
};

/// A command line that is refused, and texts of the error.
struct BadLine {
  std::vector<std::string> words;
  std::vector<std::string> said;
};

}  // namespace ddp::testing
