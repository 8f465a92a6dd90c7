#include <ddp/abilities.h>

#include <string>

namespace ddp {
namespace {

std::string backend_name(c10d::ProcessGroup& group, c10::Device device) {
  return group.getBackend(device.type())->getBackendName();
}

}  // namespace

bool averages_in_collective(c10d::ProcessGroup& group, c10::Device device) {
  const auto name = backend_name(group, device);
  return name == "shm" || name == "nccl";
}

bool waits_on_stream(c10d::ProcessGroup& group, c10::Device device) {
  return backend_name(group, device) == "nccl";
}

}  // namespace ddp
