#include "stats/device_utilization.h"

#include <dlfcn.h>

namespace ddp {
namespace {

// As the headers of CUDA and NVML declare them, which a build without CUDA does not have. Both
// libraries return 0 for success.
using CuDeviceGet = int (*)(int* device, int ordinal);
using CuDeviceGetPciBusId = int (*)(char* id, int length, int device);
using NvmlInit = int (*)();
using NvmlDeviceGetHandleByPciBusId = int (*)(const char* id, void** device);
struct NvmlUtilization {
  unsigned int gpu;
  unsigned int memory;
};
using NvmlDeviceGetUtilizationRates = int (*)(void* device, NvmlUtilization* rates);

void* opened(const std::string& library) { return dlopen(library.c_str(), RTLD_LAZY | RTLD_LOCAL); }

template <typename Function>
Function function_of(void* library, const char* name) {
  return library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
}

// The GPU's address. NVML counts GPUs in another order, and those too that CUDA_VISIBLE_DEVICES
// hides.
std::optional<std::string> pci_address(int index, void* cuda) {
  const auto get = function_of<CuDeviceGet>(cuda, "cuDeviceGet");
  const auto get_address = function_of<CuDeviceGetPciBusId>(cuda, "cuDeviceGetPCIBusId");
  int device = 0;
  char address[32] = {};
  if (!get || !get_address || get(&device, index) != 0) return {};
  if (get_address(address, sizeof(address), device) != 0) return {};
  return address;
}

}  // namespace

std::function<std::optional<int>()> device_utilization(
    int index, const DriverLibraries& libraries) {
  const auto address = pci_address(index, opened(libraries.cuda));
  if (!address) return nullptr;
  void* const nvml = opened(libraries.management);
  const auto init = function_of<NvmlInit>(nvml, "nvmlInit_v2");
  const auto find =
      function_of<NvmlDeviceGetHandleByPciBusId>(nvml, "nvmlDeviceGetHandleByPciBusId_v2");
  const auto rates_of =
      function_of<NvmlDeviceGetUtilizationRates>(nvml, "nvmlDeviceGetUtilizationRates");
  void* device = nullptr;
  if (!init || !find || !rates_of || init() != 0) return nullptr;
  if (find(address->c_str(), &device) != 0) return nullptr;
  return [device, rates_of]() -> std::optional<int> {
    NvmlUtilization rates{};
    if (rates_of(device, &rates) != 0) return {};
    return static_cast<int>(rates.gpu);
  };
}

}  // namespace ddp
