// The current stream of a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ddp {

inline c10::Stream current_stream_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// Called before the last reference to `tensor` goes: the current stream of its device uses it, and
/// need not be the one that it was allocated on, whose later work may get its memory. Nothing for
/// an undefined tensor, or one of the CPU.
///
/// Cost: none where the stream is the same, else an event when the memory is freed.
inline void record_use(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return;
  tensor.record_stream(current_stream_of(tensor.device()));
}

/// Whether the current stream of `device` is being captured into a graph that is replayed later
/// (cudaStreamBeginCapture), so that it runs nothing now. The host must then neither wait for the
/// device nor query it, and host writes of the step are not repeated in a replay.
///
/// Cost: one call of the CUDA runtime on a GPU; nothing on the CPU.
bool is_capturing(c10::Device device);

}  // namespace ddp
