// What a step of a sharded model sends, beside that of replicas.
#include <array>
#include <cstdint>
#include <vector>

#include <ddp/ddp.h>
#include <ddp/internal/group_monitor.h>

#include "comm/calls/call_history.h"
#include "comm/monitor/flight_record.h"
#include "parallel/sharded/own_group.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::CollectiveKind;

namespace {

/// The bytes of the tensors that a rank has summed, and has gathered, in some groups. An all-reduce
/// counts as both, for it sends as much as a reduce-scatter and an all-gather.
struct Traffic {
  std::array<int64_t, 2> bytes{};
  int64_t total() const { return bytes[0] + bytes[1]; }
};

Traffic traffic_of(const std::vector<ddp::ProcessGroup>& groups) {
  Traffic traffic;
  for (const auto& group : groups) {
    const auto record = ddp::monitor_of(group)->flight_record();
    const auto& calls = record.lanes.at(0).calls;
    TORCH_CHECK(record.lanes.at(0).first == 0, "the record has lost calls");
    for (const auto& call : calls) {
      if (call.dtype < 0) continue;
      const auto bytes = static_cast<int64_t>(
          call.numel * c10::elementSize(static_cast<c10::ScalarType>(call.dtype)));
      const bool sums =
          call.kind == CollectiveKind::AllReduce || call.kind == CollectiveKind::ReduceScatter;
      const bool gathers =
          call.kind == CollectiveKind::AllReduce || call.kind == CollectiveKind::AllGather;
      TORCH_CHECK(sums || gathers || call.kind == CollectiveKind::Broadcast, ddp::to_text(call));
      traffic.bytes[0] += sums ? bytes : 0;
      traffic.bytes[1] += gathers ? bytes : 0;
    }
  }
  return traffic;
}

Traffic operator-(const Traffic& a, const Traffic& b) {
  return {{a.bytes[0] - b.bytes[0], a.bytes[1] - b.bytes[1]}};
}

torch::nn::Sequential wide_net() {
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) net->push_back(torch::nn::Linear(128, 128));
  return net;
}

/// Two steps after a first one, in which a wrapper compares more.
template <typename Model>
Traffic traffic_of_two_steps(Model& model, const std::vector<ddp::ProcessGroup>& groups) {
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  Traffic before;
  for (int step = 0; step < 3; ++step) {
    if (step == 1) before = traffic_of(groups);
    optimizer.zero_grad();
    model->forward(torch::ones({2, 128})).sum().backward();
    optimizer.step();
  }
  return traffic_of(groups) - before;
}

/// \param reshards  after forward; unset: replicas.
std::vector<Traffic> traffic(int ranks, std::optional<bool> reshards) {
  return run_ranks<Traffic>(ranks, [&](const Rank& self) {
    auto net = wide_net();
    if (!reshards) {
      ddp::DistributedDataParallel model(
          net, ddp::DistributedDataParallelOptions().process_group(self.group));
      return traffic_of_two_steps(model, {self.group});
    }
    const auto options =
        ddp::FullyShardedOptions().process_group(self.group).reshard_after_forward(*reshards);
    ddp::fully_shard(net, 64, options);
    ddp::FullyShardedDataParallel model(net, options);
    return traffic_of_two_steps(
        model, {self.group, ddp::own_group_of(self.group, ddp::OwnOrder::Gathers).group,
                ddp::own_group_of(self.group, ddp::OwnOrder::Reductions).group});
  });
}

}  // namespace

TEST_CASE("a sharded model sends 1.5 times what replicas send, or as much", "[ranks][sharded]") {
  const auto replicas = traffic(2, std::nullopt);
  const auto sharded = traffic(2, true);
  const auto kept = traffic(2, false);
  // Two steps of four layers, whose shards need no padding.
  constexpr int64_t kModel = 2 * 4 * (128 * 128 + 128) * static_cast<int64_t>(sizeof(float));
  for (size_t rank = 0; rank < 2; ++rank) {
    CAPTURE(rank, replicas[rank].bytes, sharded[rank].bytes, kept[rank].bytes, kModel);
    CHECK(replicas[rank].total() >= 2 * kModel);
    CHECK(sharded[rank].total() >= 3 * kModel);
    CHECK(sharded[rank].total() < 1.51 * replicas[rank].total());
    CHECK(kept[rank].total() >= 2 * kModel);
    CHECK(kept[rank].total() < 1.01 * replicas[rank].total());
  }
}
