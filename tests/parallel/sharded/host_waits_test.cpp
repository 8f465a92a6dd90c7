// Steps of a fully sharded model on a device that runs nothing before it is waited for: the host
// queues them without a wait, and what it queues does not grow with the number of ranks. All ranks
// of its groups have what this one has.
#include <ddp/ddp.h>

#include <mutex>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "support/meeting.h"
#include "support/ranks.h"
#include "support/toy_device.h"

#include "support/catch.h"

namespace ddp::testing {
namespace {

struct Steps {
  int ranks = 2;
  int units = 4;
  int replicas = 1;
  int64_t prefetch = 1;
  bool accumulates = false;  // a micro-batch without reduction before
  bool clips = false;
};

/// The hosts' work in a step, on all ranks together.
struct Queued {
  int waits = 0;
  int blocking_copies = 0;
  int pageable_copies = 0;
  int launches = 0;  // but those of collectives
};

/// The third step's.
Queued queued_by(const Steps& steps) {
  auto& device = toy::Device::get();
  device.forget();
  Meeting meeting(steps.ranks);
  const auto body = [&](const Rank& self) {
    Queued queued;
    const c10::Device of_rank(
        at::kPrivateUse1, static_cast<c10::DeviceIndex>(self.rank % toy::kDevices));
    auto options = FullyShardedOptions().prefetch(steps.prefetch);
    if (steps.replicas == 1) {
      options.process_group(self.group);
    } else {
      const int shards = self.size / steps.replicas;
      options.mesh(init_device_mesh({steps.replicas, shards}, {"replicas", "shards"}, self.group));
    }
    torch::nn::Sequential net;
    for (int i = 0; i < steps.units; ++i) {
      torch::nn::Linear layer(torch::nn::LinearOptions(16, 16).bias(false));  // no padding
      layer->to(of_rank);
      net->push_back(layer);
    }
    fully_shard_children(net, options);
    FullyShardedDataParallel<torch::nn::Sequential> model(net, options);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    const auto x = torch::ones({2, 16}).to(of_rank);
    for (int step = 0; step < 3; ++step) {
      meeting.come();
      if (step == 2 && self.rank == 0) device.forget();
      meeting.come();
      optimizer.zero_grad();
      if (steps.accumulates) {
        const auto guard = model->no_sync();
        model->forward(x).sum().backward();
      }
      model->forward(x).sum().backward();
      if (steps.clips) clip_grad_norm_(*model, 0.1);
      optimizer.step();
    }
    meeting.come();
    const std::lock_guard lock(device.mutex);
    for (const auto& [stream, count] : device.launches) {
      if (stream != toy::kEchoStream) queued.launches += count;
    }
    queued.waits = device.host_waits;
    for (const auto& copy : device.copies) {
      queued.blocking_copies += copy.non_blocking ? 0 : 1;
      queued.pageable_copies += copy.pinned ? 0 : 1;
    }
    return queued;
  };
  return run_ranks<Queued>(steps.ranks, toy::over_echo(), body)[0];
}

}  // namespace

TEST_CASE("a fully sharded step waits for nothing", "[ranks][sharded][streams]") {
  Steps steps;
  SECTION("of any number of units") {
    steps.units = GENERATE(1, 4, 32);
    steps.prefetch = GENERATE(0, 1);
  }
  SECTION("on any number of ranks") { steps.ranks = GENERATE(1, 2, 4, 8); }
  SECTION("with replicas") {
    steps.ranks = 4;
    steps.replicas = 2;
  }
  SECTION("that accumulates") { steps.accumulates = true; }
  SECTION("that clips") { steps.clips = true; }
  CAPTURE(steps.ranks, steps.units, steps.prefetch, steps.replicas);
  const auto queued = queued_by(steps);
  CHECK(queued.waits == 0);
  CHECK(queued.blocking_copies == 0);
  CHECK(queued.pageable_copies == 0);
}

TEST_CASE("what a fully sharded step queues does not grow with the ranks", "[ranks][sharded]") {
  const auto of_a_rank = [](int ranks) {
    Steps steps;
    steps.ranks = ranks;
    return queued_by(steps).launches / ranks;
  };
  const auto of_two = of_a_rank(2);
  CHECK(of_a_rank(4) == of_two);
  CHECK(of_a_rank(8) == of_two);
}

}  // namespace ddp::testing
