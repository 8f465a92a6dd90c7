// The only file that includes ProcessGroupGloo.hpp, and so the only one compiled with gloo_shim/.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "backends/backends.h"

namespace ddp::backends {

c10::intrusive_ptr<c10d::Backend> make_gloo(const Setup& setup, const GlooDevices& devices) {
  using c10d::ProcessGroupGloo;
  auto options = ProcessGroupGloo::Options::create(setup.timeout);
  options->group_name = setup.group_name;
  options->global_ranks_in_group = setup.global_ranks;
  for (const auto& name : devices.interfaces) {
    options->devices.push_back(ProcessGroupGloo::createDeviceForInterface(name));
  }
  if (options->devices.empty()) {
    options->devices.push_back(ProcessGroupGloo::createDeviceForHostname(devices.address));
  }
  return c10::make_intrusive<ProcessGroupGloo>(
      setup.store, setup.rank, setup.world_size, std::move(options));
}

}  // namespace ddp::backends
