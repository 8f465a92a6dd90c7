// The counts of calls of the CUDA runtime. Runs with and without a GPU: a call that the runtime
// refuses has been made, too.
#include <functional>
#include <string>
#include <vector>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include "ddp/cuda_calls.h"
#include "ddp/host_waits.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace ddp::testing;

/// The number that `calls` adds to each count.
CudaCallCounts counted(const std::function<void()>& calls) {
  const auto before = cuda_calls();
  calls();
  auto added = cuda_calls();
  for (size_t i = 0; i < added.size(); ++i) added[i] -= before[i];
  (void)cudaGetLastError();  // of the calls, not of what the process does afterwards
  return added;
}

CudaCallCounts expected(std::vector<CudaCall> calls) {
  CudaCallCounts counts{};
  for (const auto call : calls) ++counts[static_cast<size_t>(call)];
  return counts;
}

struct Counted {
  CudaCall kind;
  std::function<void()> call;
};

std::vector<Counted> each_call() {
  static int there = 0, here = 0;
  return {
      {CudaCall::Launch, [] { (void)cudaLaunchKernel(nullptr, 1, 1, nullptr, 0, nullptr); }},
      {CudaCall::Launch,
       [] {
         const cudaLaunchConfig_t config{};
         (void)cudaLaunchKernelExC(&config, nullptr, nullptr);
       }},
      {CudaCall::GraphLaunch, [] { (void)cudaGraphLaunch(nullptr, nullptr); }},
      {CudaCall::Copy,
       [] { (void)cudaMemcpyAsync(&there, &here, 4, cudaMemcpyHostToHost, nullptr); }},
      {CudaCall::Memset, [] { (void)cudaMemsetAsync(nullptr, 0, 0, nullptr); }},
      {CudaCall::EventRecord, [] { (void)cudaEventRecord(nullptr, nullptr); }},
      {CudaCall::EventRecord, [] { (void)cudaEventRecordWithFlags(nullptr, nullptr, 0); }},
      {CudaCall::EventCreate, [] { (void)cudaEventCreateWithFlags(nullptr, 0); }},
      {CudaCall::Query, [] { (void)cudaEventQuery(nullptr); }},
      {CudaCall::StreamWait, [] { (void)cudaStreamWaitEvent(nullptr, nullptr, 0); }},
      {CudaCall::Synchronize, [] { (void)cudaStreamSynchronize(nullptr); }},
      {CudaCall::Synchronize, [] { (void)cudaEventSynchronize(nullptr); }},
      {CudaCall::Synchronize, [] { (void)cudaDeviceSynchronize(); }},
      {CudaCall::Synchronize, [] { (void)cudaMemcpy(&there, &here, 4, cudaMemcpyHostToHost); }},
      {CudaCall::Allocate, [] { (void)cudaMalloc(static_cast<void**>(nullptr), 0); }},
      {CudaCall::HostAllocate, [] { (void)cudaHostAlloc(static_cast<void**>(nullptr), 0, 0); }}};
}

}  // namespace

TEST_CASE("each call of the CUDA runtime counts once, as its kind", "[cuda_calls]") {
  for (const auto& [kind, call] : each_call()) {
    CAPTURE(name_of(kind));
    CHECK(counted(call) == expected({kind}));
  }
}

TEST_CASE("calls of LibTorch's libraries count", "[cuda_calls]") {
  const auto counts = counted([] {
    try {
      c10::cuda::device_synchronize();
    } catch (const c10::Error&) {  // no device
    }
  });
  CHECK(counts == expected({CudaCall::Synchronize}));
}

TEST_CASE("calls that do not wait are no waits of the host", "[cuda_calls]") {
  const HostWaits waits;
  for (const auto& [kind, call] : each_call()) {
    if (kind != CudaCall::Synchronize) call();
  }
  CHECK(waits.seen() == std::vector<std::string>{});
  CHECK(waits.polls() == 0);
  (void)cudaGetLastError();
}

}  // namespace ddp
