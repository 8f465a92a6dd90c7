// Stands in for libcuda.so.1 and libnvidia-ml.so.1, of a machine with two GPUs that CUDA counts in
// the other order than NVML. The first of CUDA is busy 37% of the time.
#include <cstdio>
#include <cstring>

#define STAND_IN __attribute__((visibility("default")))

extern "C" {

STAND_IN const char* stand_in_fails = "";  ///< the function that returns an error
STAND_IN int stand_in_calls = 0;           ///< of nvmlDeviceGetUtilizationRates

}  // extern "C"

namespace {

constexpr const char* kAddresses[] = {"0000:3B:00.0", "0000:1A:00.0"};
int gpus[] = {37, 99};
bool is_ready = false;

int failed(const char* function) { return std::strcmp(stand_in_fails, function) == 0 ? 999 : 0; }

}  // namespace

extern "C" {

STAND_IN int cuDeviceGet(int* device, int ordinal) {
  if (ordinal > 1) return 101;
  *device = ordinal;
  return failed("cuDeviceGet");
}

STAND_IN int cuDeviceGetPCIBusId(char* id, int length, int device) {
  std::snprintf(id, static_cast<size_t>(length), "%s", kAddresses[device]);
  return failed("cuDeviceGetPCIBusId");
}

STAND_IN int nvmlInit_v2() {
  is_ready = failed("nvmlInit_v2") == 0;
  return failed("nvmlInit_v2");
}

STAND_IN int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  if (!is_ready) return 1;
  for (int i = 0; i < 2; ++i) {
    if (std::strcmp(id, kAddresses[i]) == 0) *device = &gpus[i];
  }
  return failed("nvmlDeviceGetHandleByPciBusId_v2");
}

STAND_IN int nvmlDeviceGetUtilizationRates(void* device, unsigned int* rates) {
  ++stand_in_calls;
  rates[0] = static_cast<unsigned int>(*static_cast<int*>(device));
  rates[1] = 11;  // of memory
  return failed("nvmlDeviceGetUtilizationRates");
}

}  // extern "C"
