#include "join/model_join_hook.h"

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
namespace {

// Gives all ranks the state of rank `source`'s optimizer, by LibTorch's own serialization: moments,
// momentum and step counts by the parameters' order, and the options of the parameter groups.
// Collective: two broadcasts, of 8 bytes and of the serialized state; the same kind of optimizer on
// every rank.
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

}  // namespace

void ModelJoinHook::main_hook() {
  const auto terms = model_.terms().of_joined_pass();
  model_.compare_in_first_pass();
  model_.reducer().join_backward(terms);
}

void ModelJoinHook::post_hook(bool is_last_joiner) {
  const auto round =
      all_reduce_status({is_last_joiner}, model_.group(), model_.device(), model_.monitor());
  model_.broadcast_model(round.last_active(), model_.shares_buffers());
  for (auto* optimizer : options_.optimizers()) {
    broadcast_optimizer(*optimizer, round.last_active(), model_.group(), model_.monitor());
  }
  const bool uneven = round.active() < round.size();
  if (uneven && options_.optimizers().empty() && !model_.steps_without_input()) {
    TORCH_WARN_ONCE(
        "join: some ranks had less input than others, so their optimizers took fewer steps. The "
        "models are equal now; momentum, moments and step counts of optimizers are not, and the "
        "models will drift apart. Pass JoinOptions().optimizers({&optimizer}), or use "
        "step_in_backward().");
  }
}

}  // namespace ddp
