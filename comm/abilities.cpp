#include <ddp/abilities.h>

namespace ddp {

bool averages_in_collective(c10d::ProcessGroup& group, c10::Device device) {
  const auto name = group.getBackend(device.type())->getBackendName();
  return name == "shm" || name == "nccl";
}

}  // namespace ddp
