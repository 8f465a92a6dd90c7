// Helpers of the cases that need a GPU.
#pragma once

#include <iostream>

#include <torch/cuda.h>

namespace ddp::testing {

/// Whether there is no GPU; prints a line by which CTest counts the program as skipped.
inline bool lacks_cuda() {
  if (torch::cuda::is_available()) return false;
  std::cout << "skipped: no CUDA device" << std::endl;
  return true;
}

}  // namespace ddp::testing
