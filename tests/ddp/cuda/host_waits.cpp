// The dynamic linker prefers the definitions in a program to those in its libraries, and LibTorch
// loads the CUDA runtime as a shared library. So its calls of the runtime reach these functions.
#include "ddp/host_waits.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

#include "ddp/cuda_calls.h"

// Exported, since the build hides symbols by default and the libraries have to find these.
#pragma GCC visibility push(default)
#include <cuda_runtime_api.h>
#pragma GCC visibility pop

namespace {

using ddp::testing::CudaCall;

std::array<std::atomic<int64_t>, ddp::testing::kCudaCallKinds> counts{};

void count(CudaCall call) { ++counts[static_cast<size_t>(call)]; }

std::mutex mutex;

std::vector<std::string>& all_seen() {
  static std::vector<std::string> seen;
  return seen;
}

void note(const char* name, CudaCall call = CudaCall::Synchronize) {
  count(call);
  const std::lock_guard lock(mutex);
  all_seen().emplace_back(name);
}

// Each thread has its count, because NCCL's watchdog polls on one of its own.
thread_local int64_t polls_of_thread = 0;

cudaError_t note_poll(cudaError_t answer) {
  count(CudaCall::Query);
  if (answer == cudaErrorNotReady) {
    count(CudaCall::EarlyQuery);
    ++polls_of_thread;
  }
  return answer;
}

template <typename Function>
Function runtime_function(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// A copy from or to memory that is not pinned ends when the host has moved the bytes.
bool is_pageable(const void* memory) {
  cudaPointerAttributes attributes{};
  return cudaPointerGetAttributes(&attributes, memory) == cudaSuccess &&
         attributes.type == cudaMemoryTypeUnregistered;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

cudaError_t cudaDeviceSynchronize() {
  note("cudaDeviceSynchronize");
  static const auto real = runtime_function<cudaError_t (*)()>("cudaDeviceSynchronize");
  return real();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  note("cudaStreamSynchronize");
  static const auto real = runtime_function<cudaError_t (*)(cudaStream_t)>("cudaStreamSynchronize");
  return real(stream);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  note("cudaEventSynchronize");
  static const auto real = runtime_function<cudaError_t (*)(cudaEvent_t)>("cudaEventSynchronize");
  return real(event);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  static const auto real = runtime_function<cudaError_t (*)(cudaStream_t)>("cudaStreamQuery");
  return note_poll(real(stream));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  static const auto real = runtime_function<cudaError_t (*)(cudaEvent_t)>("cudaEventQuery");
  return note_poll(real(event));
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  note("cudaMemcpy");
  using Function = cudaError_t (*)(void*, const void*, size_t, cudaMemcpyKind);
  static const auto real = runtime_function<Function>("cudaMemcpy");
  return real(to, from, bytes, kind);
}

cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  using Function = cudaError_t (*)(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t);
  static const auto real = runtime_function<Function>("cudaMemcpyAsync");
  const bool from_host = kind == cudaMemcpyHostToDevice && is_pageable(from);
  const bool to_host = kind == cudaMemcpyDeviceToHost && is_pageable(to);
  if (from_host || to_host) {
    note("cudaMemcpyAsync of pageable memory", CudaCall::PageableCopy);
  } else {
    count(CudaCall::Copy);
  }
  return real(to, from, bytes, kind, stream);
}

cudaError_t cudaLaunchKernel(
    const void* kernel, dim3 blocks, dim3 threads, void** arguments, size_t shared_bytes,
    cudaStream_t stream) {
  count(CudaCall::Launch);
  using Function = cudaError_t (*)(const void*, dim3, dim3, void**, size_t, cudaStream_t);
  static const auto real = runtime_function<Function>("cudaLaunchKernel");
  return real(kernel, blocks, threads, arguments, shared_bytes, stream);
}

cudaError_t cudaLaunchKernelExC(
    const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  count(CudaCall::Launch);
  using Function = cudaError_t (*)(const cudaLaunchConfig_t*, const void*, void**);
  static const auto real = runtime_function<Function>("cudaLaunchKernelExC");
  return real(config, kernel, arguments);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  count(CudaCall::GraphLaunch);
  using Function = cudaError_t (*)(cudaGraphExec_t, cudaStream_t);
  static const auto real = runtime_function<Function>("cudaGraphLaunch");
  return real(graph, stream);
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  count(CudaCall::Memset);
  using Function = cudaError_t (*)(void*, int, size_t, cudaStream_t);
  static const auto real = runtime_function<Function>("cudaMemsetAsync");
  return real(memory, value, bytes, stream);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  count(CudaCall::EventRecord);
  using Function = cudaError_t (*)(cudaEvent_t, cudaStream_t);
  static const auto real = runtime_function<Function>("cudaEventRecord");
  return real(event, stream);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
  count(CudaCall::EventRecord);
  using Function = cudaError_t (*)(cudaEvent_t, cudaStream_t, unsigned int);
  static const auto real = runtime_function<Function>("cudaEventRecordWithFlags");
  return real(event, stream, flags);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  count(CudaCall::EventCreate);
  using Function = cudaError_t (*)(cudaEvent_t*, unsigned int);
  static const auto real = runtime_function<Function>("cudaEventCreateWithFlags");
  return real(event, flags);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  count(CudaCall::StreamWait);
  using Function = cudaError_t (*)(cudaStream_t, cudaEvent_t, unsigned int);
  static const auto real = runtime_function<Function>("cudaStreamWaitEvent");
  return real(stream, event, flags);
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  count(CudaCall::Allocate);
  static const auto real = runtime_function<cudaError_t (*)(void**, size_t)>("cudaMalloc");
  return real(memory, bytes);
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned int flags) {
  count(CudaCall::HostAllocate);
  using Function = cudaError_t (*)(void**, size_t, unsigned int);
  static const auto real = runtime_function<Function>("cudaHostAlloc");
  return real(memory, bytes, flags);
}

}  // extern "C"
#pragma GCC visibility pop

namespace ddp::testing {

HostWaits::HostWaits() : first_poll_(polls_of_thread) {
  const std::lock_guard lock(mutex);
  first_ = all_seen().size();
}

std::vector<std::string> HostWaits::seen() const {
  const std::lock_guard lock(mutex);
  return {all_seen().begin() + static_cast<std::ptrdiff_t>(first_), all_seen().end()};
}

const char* name_of(CudaCall call) {
  static constexpr std::array<const char*, kCudaCallKinds> names{
      "launches",         "graph_launches", "copies",          "pageable_copies", "memsets",
      "event_records",    "event_creates",  "queries",         "early_queries",   "stream_waits",
      "synchronizations", "allocations",    "host_allocations"};
  return names[static_cast<size_t>(call)];
}

CudaCallCounts cuda_calls() {
  CudaCallCounts now{};
  for (size_t i = 0; i < kCudaCallKinds; ++i) now[i] = counts[i];
  return now;
}

int64_t HostWaits::polls() const { return polls_of_thread - first_poll_; }

}  // namespace ddp::testing
