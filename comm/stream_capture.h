// The part of is_capturing() that needs CUDA: cuda_capture.cpp where LibTorch has its CUDA part and
// no_cuda_capture.cpp elsewhere.
#pragma once

#include <c10/core/Device.h>

namespace ddp {

bool is_capturing_on_cuda(c10::DeviceIndex device);

}  // namespace ddp
