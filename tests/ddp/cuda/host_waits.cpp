// The dynamic linker prefers the definitions in a program to those in its libraries, and LibTorch
// loads the CUDA runtime as a shared library. So its calls of the runtime reach these functions.
#include "ddp/host_waits.h"

#include <dlfcn.h>

#include <mutex>

// Exported, since the build hides symbols by default and the libraries have to find these.
#pragma GCC visibility push(default)
#include <cuda_runtime_api.h>
#pragma GCC visibility pop

namespace {

std::mutex mutex;

std::vector<std::string>& all_seen() {
  static std::vector<std::string> seen;
  return seen;
}

void note(const char* name) {
  const std::lock_guard lock(mutex);
  all_seen().emplace_back(name);
}

// Each thread has its count, because NCCL's watchdog polls on one of its own.
thread_local int64_t polls_of_thread = 0;

cudaError_t note_poll(cudaError_t answer) {
  if (answer == cudaErrorNotReady) ++polls_of_thread;
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
  if (from_host || to_host) note("cudaMemcpyAsync of pageable memory");
  return real(to, from, bytes, kind, stream);
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

int64_t HostWaits::polls() const { return polls_of_thread - first_poll_; }

}  // namespace ddp::testing
