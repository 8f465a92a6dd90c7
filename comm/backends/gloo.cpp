// The only file that includes ProcessGroupGloo.hpp, and so the only one compiled with gloo_shim/.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "backends/backends.h"
#include "backends/gloo_point_to_point.h"

namespace ddp::backends {
namespace {

using c10d::ProcessGroupGloo;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Gloo's connections keep the timeout they were made with for sends and receives; these give each
// the group's own, and can be polled.
class Gloo : public ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  WorkPtr send(Tensors& tensors, int dst, int tag) override {
    return pollable(ProcessGroupGloo::send(tensors, dst, tag));
  }
  WorkPtr recv(Tensors& tensors, int src, int tag) override {
    return pollable(ProcessGroupGloo::recv(tensors, src, tag));
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return pollable(ProcessGroupGloo::recvAnysource(tensors, tag));
  }

 private:
  WorkPtr pollable(WorkPtr work) {
    return c10::make_intrusive<GlooPointToPoint>(std::move(work), options_->timeout);
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo(const Setup& setup, const GlooDevices& devices) {
  auto options = ProcessGroupGloo::Options::create(setup.connect_by.left());
  options->group_name = setup.group_name;
  options->global_ranks_in_group = setup.global_ranks;
  for (const auto& name : devices.interfaces) {
    options->devices.push_back(ProcessGroupGloo::createDeviceForInterface(name));
  }
  if (options->devices.empty()) {
    options->devices.push_back(ProcessGroupGloo::createDeviceForHostname(devices.address));
  }
  auto gloo = c10::make_intrusive<Gloo>(setup.store, setup.rank, setup.world_size, options);
  gloo->setTimeout(setup.timeout);
  return gloo;
}

}  // namespace ddp::backends
