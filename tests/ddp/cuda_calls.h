// Counts the calls of the CUDA runtime that a step makes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ddp::testing {

/// A kind of call. Its name in reports: name_of().
enum class CudaCall : std::uint8_t {
  Launch,
  GraphLaunch,
  Copy,
  PageableCopy,  ///< the host waits until its bytes have moved
  Memset,
  EventRecord,
  EventCreate,
  Query,       ///< of an event or a stream
  EarlyQuery,  ///< of these, the ones to which the device answers "not yet"
  StreamWait,
  Synchronize,
  Allocate,
  HostAllocate,
};
constexpr size_t kCudaCallKinds = 13;

/// Calls of each kind, in the order of CudaCall.
using CudaCallCounts = std::array<int64_t, kCudaCallKinds>;

/// Such as "launches".
const char* name_of(CudaCall call);

/// The calls of all threads of the process until now, in a program that is linked with
/// host_waits.cpp. NCCL and cuBLAS have runtimes of their own, so their launches are in none.
CudaCallCounts cuda_calls();

}  // namespace ddp::testing
