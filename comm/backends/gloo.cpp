// The only file that includes ProcessGroupGloo.hpp, and so the only one compiled with gloo_shim/.
#include <csignal>

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

  // Which c10d's leaves to its base class, where it does nothing: what waits would wait on.
  void abort() override {
    for (const auto& context : contexts_) context->closeConnections();
  }

 private:
  WorkPtr pollable(WorkPtr work) {
    return c10::make_intrusive<GlooPointToPoint>(std::move(work), options_->timeout);
  }
};

// Gloo writes to sockets whose other end may be gone, which kills a process that has not said
// otherwise; then nobody would learn which rank died. As Python does in every program. A handler
// of the program's own stays.
void ignore_broken_pipes() {
  struct sigaction action = {};
  ::sigaction(SIGPIPE, nullptr, &action);
  if (action.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo(const Setup& setup, const GlooDevices& devices) {
  ignore_broken_pipes();
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
