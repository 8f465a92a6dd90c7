#include "zero/optimizer_state.h"

#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/text.h>
#include <torch/serialize.h>

namespace ddp {
void broadcast_optimizer(
    torch::optim::Optimizer& optimizer, int source, const ProcessGroup& group,
    GroupMonitor& monitor) {
  if (group->getSize() == 1) return;
  const auto where = [source] { return ddp::str("getting the optimizer of rank ", source); };
  monitor.abort_on_error(where, [&] {
    const auto device = carrier_device(*group);
    const auto broadcast = [&](const at::Tensor& tensor) {
      std::vector<at::Tensor> tensors{tensor.to(device)};
      c10d::BroadcastOptions options;
      options.rootRank = source;
      monitor.wait(*group->broadcast(tensors, options), where);
      return tensors.front().cpu();
    };
    const bool sends = group->getRank() == source;
    std::string archive;
    if (sends) {
      std::ostringstream stream;
      torch::save(optimizer, stream);
      archive = stream.str();
    }
    const auto size =
        broadcast(at::full({1}, static_cast<int64_t>(archive.size()), at::kLong)).item<int64_t>();
    auto bytes = at::empty({size}, at::kByte);
    if (sends) std::memcpy(bytes.mutable_data_ptr(), archive.data(), archive.size());
    bytes = broadcast(bytes);
    if (sends) return;
    std::istringstream stream(
        std::string(static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(size)));
    // The archive names the source's devices, which on several GPUs are not this rank's.
    const auto& groups = optimizer.param_groups();
    const bool has_parameters = !groups.empty() && !groups.front().params().empty();
    const auto own = has_parameters ? groups.front().params().front().device() : at::kCPU;
    torch::load(optimizer, stream, own);
  });
}

}  // namespace ddp
