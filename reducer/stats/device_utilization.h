#pragma once

#include <functional>
#include <optional>
#include <string>

namespace ddp {

/// The libraries of NVIDIA's driver, by name.
struct DriverLibraries {
  std::string cuda = "libcuda.so.1";
  std::string management = "libnvidia-ml.so.1";  ///< NVML
};

/// How busy a GPU is, as torch.cuda.utilization() has it: for how many percent of the driver's last
/// period, a sixth of a second to a second long, at least one kernel ran, of any process.
///
/// The libraries are looked for now, at run time, so that the program links neither. They stay
/// loaded, as the CUDA runtime keeps them.
///
/// \param index  of the GPU, as CUDA counts those that the process sees.
/// \return  a function that asks the driver, once a call; none where it does not answer. Null where
///     a library or the GPU is missing, or CUDA has not begun. Threads: any.
std::function<std::optional<int>()> device_utilization(
    int index, const DriverLibraries& libraries = {});

}  // namespace ddp
