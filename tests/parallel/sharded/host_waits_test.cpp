// Steps of a fully sharded model on a device that runs nothing before it is waited for: the host
// queues them without a wait, and what it queues does not grow with the number of ranks. All ranks
// of its groups have what this one has.
#include <ddp/backend.h>
#include <ddp/ddp.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "support/ranks.h"
#include "support/toy_device.h"

#include "support/catch.h"

namespace ddp::testing {
namespace {

RanksOptions over_waiting_echo() {
  [[maybe_unused]] static const bool once = [] {
    const auto make = [](const BackendSetup& setup) {
      return toy::make_echo(setup.rank, setup.size);
    };
    register_backend(
        "waits_echo", BackendDescription()
                          .devices({at::kCPU, at::kPrivateUse1})
                          .waits_on_stream(true)
                          .averages(true)
                          .make(make));
    return true;
  }();
  return over("waits_echo");
}

struct Steps {
  int ranks = 2;
  int units = 4;
  int replicas = 1;
  int64_t prefetch = 1;
  bool accumulates = false;  // a micro-batch without reduction before
  bool clips = false;
};

/// What the host did in a step, on all ranks together.
struct Queued {
  int waits = 0;
  int blocking_copies = 0;
  int pageable_copies = 0;
  int copies = 0;
  size_t operations = 0;
};

/// Without those of collectives.
size_t count_operations() {
  auto& device = toy::Device::get();
  const std::lock_guard lock(device.mutex);
  size_t count = 0;
  for (const auto& [key, stream] : device.streams) {
    if (key.second != toy::kEchoStream) count += stream.end();
  }
  return count;
}

/// Where the threads of all ranks meet: the echo has no barrier.
class Meeting {
 public:
  explicit Meeting(int ranks) : ranks_(ranks) {}

  void wait() {
    std::unique_lock lock(mutex_);
    const auto meeting = arrived_ / ranks_;
    ++arrived_;
    all_arrived_.notify_all();
    all_arrived_.wait(lock, [&] { return arrived_ / ranks_ > meeting; });
  }

 private:
  const int ranks_;
  std::mutex mutex_;
  std::condition_variable all_arrived_;
  int arrived_ = 0;
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
      meeting.wait();
      if (step == 2 && self.rank == 0) {
        device.forget();
        queued.operations = count_operations();
      }
      meeting.wait();
      optimizer.zero_grad();
      if (steps.accumulates) {
        const auto guard = model->no_sync();
        model->forward(x).sum().backward();
      }
      model->forward(x).sum().backward();
      if (steps.clips) clip_grad_norm_(*model, 0.1);
      optimizer.step();
    }
    meeting.wait();
    const std::lock_guard lock(device.mutex);
    queued.operations = count_operations() - queued.operations;
    queued.waits = device.host_waits;
    queued.copies = static_cast<int>(device.copies.size());
    for (const auto& copy : device.copies) {
      queued.blocking_copies += copy.non_blocking ? 0 : 1;
      queued.pageable_copies += copy.pinned ? 0 : 1;
    }
    return queued;
  };
  return run_ranks<Queued>(steps.ranks, over_waiting_echo(), body)[0];
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
    return queued_by(steps).operations / static_cast<size_t>(ranks);
  };
  // The copies of a gather's and a reduction's parts are the collectives'. Some of what frees
  // memory belongs to the step before.
  constexpr size_t kOthers = 4;
  CHECK(of_a_rank(8) <= of_a_rank(2) + kOthers);
}

}  // namespace ddp::testing
