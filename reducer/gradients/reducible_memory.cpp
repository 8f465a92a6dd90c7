#include <ddp/internal/reducible_memory.h>

#include <ATen/ops/empty.h>
#include <ddp/internal/capabilities.h>

namespace ddp {

at::Tensor reducible_memory(
    c10d::ProcessGroup& group, int64_t numel, const at::TensorOptions& options) {
  if (group.getSize() > 1 && capabilities_of(group, options.device()).reduces_in_own_memory) {
    return group.getBackend(options.device().type())->allocateTensor(numel, options);
  }
  return at::empty({numel}, options);
}

}  // namespace ddp
