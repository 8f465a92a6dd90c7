// What cases that need a GPU share.
#pragma once

#include <iostream>

#include <torch/cuda.h>

namespace ddp::testing {

/// Whether there is nothing to run on. CTest counts a program that says so as skipped.
inline bool lacks_cuda() {
  if (torch::cuda::is_available()) return false;
  std::cout << "skipped: no CUDA device" << std::endl;
  return true;
}

}  // namespace ddp::testing
