#include <ddp/abilities.h>

#include <string>

#include "environment.h"

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

bool reduces_in_own_memory(c10d::ProcessGroup& group, c10::Device device) {
  const auto backend = group.getBackend(device.type());
  if (!backend->supportsTensorAlloc(device.index())) return false;
  if (backend->getBackendName() != "nccl") return true;
  return process_variable("DDP_DISABLE_COMM_MEM").value_or("1") != "1";
}

bool waits_on_stream(c10d::ProcessGroup& group, c10::Device device) {
  return backend_name(group, device) == "nccl";
}

}  // namespace ddp
