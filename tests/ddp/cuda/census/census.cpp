#include "census.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "ddp/cuda_calls.h"

namespace ddp_cuda_census {

namespace {

using Clock = std::chrono::steady_clock;
using namespace c10::cuda;

constexpr int64_t kHalfASecond = 1'000'000'000;  // in clock cycles of a GPU
constexpr int kCounted = 2;                      // steps

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// Prints one line of JSON on rank 0; `fields` begins with a comma.
void say(const char* part, const std::string& name, const std::string& fields) {
  if (ddp::get_rank() != 0) return;
  std::printf(
      R"({"part":"%s","name":"%s","by":"C++","ranks":%d%s})"
      "\n",
      part, name.c_str(), ddp::get_world_size(), fields.c_str());
  std::fflush(stdout);
}

std::string number(const char* key, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), ",\"%s\":%.12g", key, value);
  return text;
}

}  // namespace

Net make_layers(int count, int64_t width, bool normalizes) {
  torch::manual_seed(1);
  Net net;
  for (int i = 0; i < count; ++i) {
    net->push_back(torch::nn::Linear(width, width));
    if (normalizes) net->push_back(torch::nn::BatchNorm1d(width));
  }
  net->to(kGpu);
  return net;
}

at::Tensor make_input(int64_t width) { return torch::ones({32, width}, kGpu); }

void count_calls(const std::string& name, const Step& step, int warmup) {
  for (int i = 0; i < warmup; ++i) step();
  torch::cuda::synchronize();
  at::cuda::sleep(kHalfASecond);
  at::cuda::CUDAEvent woke;
  woke.record();
  const auto before = ddp::testing::cuda_calls();
  const auto begin = Clock::now();
  for (int i = 0; i < kCounted; ++i) step();
  const auto after = ddp::testing::cuda_calls();
  const double host_ms = ms_since(begin) / kCounted;
  const bool ran_ahead = !woke.query();
  torch::cuda::synchronize();
  auto fields = std::string(R"(,"ran_ahead":)") + (ran_ahead ? "true" : "false");
  fields += number("host_ms", host_ms);
  for (size_t i = 0; i < after.size(); ++i) {
    const auto* key = ddp::testing::name_of(static_cast<ddp::testing::CudaCall>(i));
    fields += number(key, static_cast<double>(after[i] - before[i]) / kCounted);
  }
  say("census", name, fields);
}

int64_t allocated_bytes() {
  torch::cuda::synchronize();
  CUDACachingAllocator::emptyCache();
  return CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current;
}

void say_memory(const std::string& name, const Step& step, int64_t before, double expected) {
  for (int i = 0; i < 4; ++i) step();
  torch::cuda::synchronize();
  CUDACachingAllocator::resetPeakStats(0);
  for (int i = 0; i < 2; ++i) step();
  torch::cuda::synchronize();
  const auto bytes = CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0];
  say("memory", name,
      number("peak_bytes", static_cast<double>(bytes.peak - before)) +
          number("rest_bytes", static_cast<double>(bytes.current - before)) +
          number("expected_bytes", expected));
}

void say_ms(const std::string& name, double ms) { say("times", name, number("ms", ms)); }

void say_time(const std::string& name, const Step& call, int warmup, int repeats) {
  for (int i = 0; i < warmup; ++i) call();
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    torch::cuda::synchronize();
    const auto begin = Clock::now();
    call();
    torch::cuda::synchronize();
    times.push_back(ms_since(begin));
  }
  std::sort(times.begin(), times.end());
  say_ms(name, times[times.size() / 2]);
}

}  // namespace ddp_cuda_census

int main(int argc, char** argv) {
  const std::string part = argc == 3 ? argv[2] : "";
  if (part != "census" && part != "memory" && part != "times") {
    std::fprintf(stderr, "usage: ddp_cuda_census BACKEND census|memory|times\n");
    return 2;
  }
  if (!torch::cuda::is_available()) {
    std::printf("skipped: no CUDA device\n");
    return 0;
  }
  try {
    ddp::init_process_group(ddp::ProcessGroupOptions().backend(argv[1]));
    if (part == "census") {
      // Cut models first: the time may end before the rest.
      ddp_cuda_census::count_cut_calls();
      ddp_cuda_census::count_wrapper_calls();
    } else if (part == "memory") {
      ddp_cuda_census::measure_memory();
    } else {
      ddp_cuda_census::measure_times();
    }
    ddp::destroy_process_group();
  } catch (const c10::Error& error) {
    std::printf("failed: %s\n", error.what_without_backtrace());
    return 1;
  }
}
