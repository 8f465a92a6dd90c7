// Declares what LibTorch's ProcessGroupGloo.hpp names, nothing more. See ../README.md.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
