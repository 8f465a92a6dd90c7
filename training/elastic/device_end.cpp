#include "elastic/device_end.h"

#include <string>

#include <ATen/ops/ones.h>
#include <c10/core/Event.h>
#include <ddp/collectives.h>
#include <ddp/elastic_errors.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/tensors_on_host.h>

namespace ddp::elastic {

void DeviceEnd::find(const ProcessGroup& group, const std::vector<Part>& parts) {
  devices_.clear();
  waited_for_.clear();
  for (const auto& part : parts) {
    for (const auto device : part.devices()) {
      const bool is_known = contains(devices_, device);
      if (!is_known) devices_.push_back(device);
    }
  }
  const auto carried = group->getDeviceTypes();
  for (const auto device : devices_) {
    const bool is_carried =
        any_of(carried, [&](c10::Device one) { return one.type() == device.type(); });
    if (group->getSize() == 1 || !is_carried) continue;
    if (capabilities_of(*group, device).waits_on_stream) waited_for_.push_back(device);
  }
}

void DeviceEnd::wait(const ProcessGroup& group) const {
  for (const auto device : waited_for_) {
    auto sum = at::ones({1}, at::dtype(at::kFloat).device(device));
    all_reduce(sum, c10d::ReduceOp::SUM, group);
    const auto result = pinned_bytes(sizeof(float)).view(at::kFloat);
    result.copy_(sum, /*non_blocking=*/true);
    c10::Event end(device.type());
    end.record(current_stream_of(device));
    const auto where = [] { return std::string("waiting for the device"); };
    monitor_of(group)->poll([&] { return end.query(); }, where);
    if (result.item<float>() == static_cast<float>(group->getSize())) continue;
    throw readable_error<RankLost>(
        DDP_HERE, ddp::str("Elastic: a collective on ", device, " has ended without a result."));
  }
}

}  // namespace ddp::elastic
