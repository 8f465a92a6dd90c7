// The part of is_capturing() that needs CUDA: in cuda_capture.cpp if LibTorch has its CUDA part, in
// no_cuda_capture.cpp otherwise.
#pragma once

#include <c10/core/Device.h>

namespace ddp {

bool is_capturing_on_cuda(c10::DeviceIndex device);

}  // namespace ddp
