// Backends of a program's own.
#include <ddp/backend.h>
#include <ddp/comm_hooks.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/text.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <thread>

#include "comm/backends/gloo/gloo.h"
#include "comm/backends/nccl/nccl.h"
#include "comm/backends/registry.h"
#include "comm/group/backend_spec.h"
#include "ddp/wrapping.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "support/relay_backend.h"
#include "support/toy_device.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace std::chrono_literals;
using namespace testing;

thread_local const char* variable = "";  // of a rank, which is a thread

BackendDescription relay(std::string own_name, std::vector<c10::DeviceType> devices) {
  return BackendDescription().devices(std::move(devices)).make([own_name](const BackendSetup& s) {
    return c10::make_intrusive<Relay>(own_name, make_loopback(s));
  });
}

void register_once() {
  [[maybe_unused]] static const bool once = [] {
    register_backend("relay", relay("relay_of_a_plugin", {at::kCPU}));
    register_backend("toy_relay", relay("toy", {at::kPrivateUse1}).waits_on_stream(true));
    return true;
  }();
}

RanksOptions registered_over(const std::string& backend) {
  register_once();
  return over(backend);
}

std::vector<at::Tensor> trained_over(const std::string& backend) {
  return run_ranks<at::Tensor>(2, registered_over(backend), [](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Linear(8, 1));
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    {
      const torch::NoGradGuard no_grad;
      for (auto& p : net->parameters()) p.uniform_(-1, 1, generator);
    }
    DistributedDataParallel<torch::nn::Sequential> model(net, in(self));
    torch::optim::SGD optimizer(model->parameters(), 0.05);
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      const auto x = torch::arange(8.0).view({2, 4}) / (3 + self.rank + step);
      model->forward(x).sum().backward();
      optimizer.step();
    }
    return torch::nn::utils::parameters_to_vector(net->parameters()).detach();
  });
}

}  // namespace

TEST_CASE("a model trains over a program's own backend as over Gloo", "[own_backend][ranks]") {
  const auto own = trained_over("relay");
  const auto gloo = trained_over("gloo");
  for (size_t rank = 0; rank < 2; ++rank) CHECK(torch::equal(own[rank], gloo[rank]));
  CHECK(torch::equal(own[0], own[1]));
}

TEST_CASE("two backends whose names c10d does not know share a group", "[own_backend][ranks]") {
  const auto names = run_ranks<std::vector<std::string>>(
      2, registered_over("cpu:relay,toy:toy_relay"), [](const Rank& self) {
        return std::vector<std::string>{
            self.group->getBackend(c10::kCPU)->getBackendName(),
            self.group->getBackend(c10::kPrivateUse1)->getBackendName(),
            self.group->getDefaultBackend()->getBackendName(),
            capabilities_of(*self.group, at::kCPU).waits_on_stream ? "waits" : "does not wait",
            capabilities_of(*self.group, c10::Device(c10::kPrivateUse1, 0)).waits_on_stream
                ? "waits"
                : "does not wait"};
      });
  const std::vector<std::string> expected{
      "relay_of_a_plugin", "toy", "relay_of_a_plugin", "does not wait", "waits"};
  CHECK(names[0] == expected);
  CHECK(names[1] == expected);
}

TEST_CASE(
    "a name that one rank has not registered is an error on all ranks",
    "[own_backend][ranks][errors]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto error_on = [&](int rank) {
    return error_of([&] {
      make_process_group(
          ProcessGroupOptions().backend("late").store(store).rank(rank).world_size(2).timeout(20s));
    });
  };
  std::string first;
  std::thread without([&] { first = error_on(0); });
  // Rank 0 has read the name once it uses the store.
  while (store->getNumKeys() == 0) std::this_thread::sleep_for(1ms);
  register_backend("late", relay("late", {at::kCPU}));
  const auto second = error_on(1);
  without.join();
  CHECK(first == second);
  CHECK_THAT(
      first, ContainsText("init_process_group on rank 0 of 2: backend(): expected gloo, shm") &&
                 ContainsText(", got \"late\"") &&
                 ContainsText("or register it with ddp::register_backend"));
}

TEST_CASE("a malformed backend of one's own is an error", "[own_backend][errors]") {
  const auto error = [](const std::string& name, const BackendDescription& description) {
    return error_of([&] { register_backend(name, description); });
  };
  const auto good = relay("x", {at::kCPU});
  CHECK_THAT(error("gloo", good), ContainsText("expected a name that is free, got \"gloo\""));
  for (const auto* name : {"a:b", "A", "", "1a", "_a", "a-b"}) {
    CAPTURE(name);
    CHECK_THAT(
        error(name, good), ContainsText("register_backend: expected lower-case letters, digits and "
                                        "_ in the name"));
  }
  CHECK_THAT(
      error("x", BackendDescription().make(good.make())),
      ContainsText("expected devices(), got none"));
  CHECK_THAT(
      error("x", BackendDescription().devices({at::kCPU})),
      ContainsText("expected make(), got none"));
  register_once();
  CHECK_THAT(error("relay", good), ContainsText("expected a name that is free, got \"relay\""));
  CHECK_THAT(
      error_of([] { parse_backend("cuda:relay", true); }),
      ContainsText("for relay serves CPU tensors only, got \"cuda:relay\""));
}

TEST_CASE("a backend that makes nothing is an error", "[own_backend][errors]") {
  register_backend(
      "nothing", BackendDescription().devices({at::kCPU}).make([](const BackendSetup&) {
        return c10::intrusive_ptr<c10d::Backend>();
      }));
  CHECK_THAT(
      error_of([] {
        make_process_group(ProcessGroupOptions()
                               .backend("nothing")
                               .store(c10::make_intrusive<c10d::HashStore>())
                               .rank(0)
                               .world_size(1)
                               .timeout(20s));
      }),
      ContainsText("backend nothing: expected make() to return a backend, got none"));
}

TEST_CASE("what a backend wants alike on all ranks is compared", "[own_backend][ranks][errors]") {
  backends::RegisteredBackend particular;
  particular.name = "particular";
  particular.devices = {"cpu"};
  particular.capabilities = [] { return BackendCapabilities(); };
  particular.make = [](const backends::Setup&) -> backends::BackendPtr { return {}; };
  particular.claim = [] { return std::string(variable); };
  REQUIRE(backends::add(particular));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto error_on = [&](int rank, const char* value) {
    variable = value;
    return error_of([&] {
      make_process_group(ProcessGroupOptions()
                             .backend("particular")
                             .store(store)
                             .rank(rank)
                             .world_size(2)
                             .timeout(20s));
    });
  };
  std::string first;
  std::thread rank_0([&] { first = error_on(0, ""); });
  const auto second = error_on(1, "VARIABLE=1");
  rank_0.join();
  CHECK(first == second);
  CHECK_THAT(first, ContainsText("with world size 2 and backend cpu:particular, VARIABLE=1"));
}

/// A backend whose memory exists once a collective has run, as NCCL's.
class LateMemory : public Relay {
 public:
  using Relay::Relay;
  WorkPtr run(Collective collective) override {
    is_connected |= collective.kind == Kind::AllReduce || collective.kind == Kind::Broadcast;
    return Relay::run(std::move(collective));
  }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    TORCH_CHECK(is_connected, "communicator has not been initialized before");
    ++allocated;
    return at::empty({size}, options);
  }
  bool is_connected = false;
  int allocated = 0;
};

TEST_CASE("buckets without a first collective lie in ordinary memory", "[own_backend][ranks]") {
  register_once();
  backends::RegisteredBackend late = *backends::find("relay");
  late.name = "late_memory";
  late.is_connected = [](c10d::Backend& b) { return dynamic_cast<LateMemory&>(b).is_connected; };
  late.make = [](const backends::Setup& setup) -> backends::BackendPtr {
    return c10::make_intrusive<LateMemory>("late_memory", backends::make_gloo(setup));
  };
  backends::add(late);  // once: the case runs twice
  const bool init_sync = GENERATE(true, false);
  CAPTURE(init_sync);
  const auto allocated =
      run_ranks<std::vector<int>>(2, registered_over("late_memory"), [&](const Rank& self) {
        torch::nn::Linear net(4, 8);
        DistributedDataParallel<torch::nn::Linear> model(net, in(self).init_sync(init_sync));
        const auto& backend =
            dynamic_cast<LateMemory&>(*self.group->getBackend(c10::DeviceType::CPU));
        std::vector<int> counts{backend.allocated};
        for (int step = 0; step < 3; ++step) model->forward(torch::ones({2, 4})).sum().backward();
        counts.push_back(backend.allocated);
        return counts;
      });
  for (const auto& counts : allocated) {
    CHECK((counts[0] > 0) == init_sync);
    CHECK(counts[1] > counts[0]);  // the buckets of the final order
  }
}

std::vector<std::string> parts_in_groups[3];  // by rank

TEST_CASE("every rank of the parent has a part in making a group", "[own_backend][ranks]") {
  backends::RegisteredBackend splitting;
  splitting.name = "splitting";
  splitting.devices = {"cpu"};
  splitting.capabilities = [] { return BackendCapabilities(); };
  splitting.make = [](const backends::Setup& setup) {
    if (setup.parent) {
      parts_in_groups[setup.global_ranks[static_cast<size_t>(setup.rank)]].push_back(
          "makes " + joined_by(" ", setup.parent_ranks));
    }
    return backends::make_gloo(setup);
  };
  splitting.participate_as_non_member = [](const backends::Setup& setup) {
    parts_in_groups[setup.rank].push_back(setup.parent ? "sits out" : "has no parent");
  };
  REQUIRE(backends::add(splitting));
  run_ranks<int>(3, registered_over("splitting"), [](const Rank& self) {
    const auto two = new_group({0, 2}, self.group);
    const auto alone = new_group({1}, self.group);
    const auto by_color = split_group(self.rank == 1 ? -1 : 0, -self.rank, self.group);
    return 0;
  });
  using Parts = std::vector<std::string>;
  CHECK(parts_in_groups[0] == Parts{"makes 0 2", "sits out", "makes 2 0"});
  CHECK(parts_in_groups[1] == Parts{"sits out", "sits out", "sits out"});
  CHECK(parts_in_groups[2] == Parts{"makes 0 2", "sits out", "makes 2 0"});
}

TEST_CASE("NCCL splits a group where that is asked for", "[own_backend]") {
  const c10::Device gpu(at::kCUDA, 0);
  CHECK_FALSE(splits_parent({}, gpu));
  CHECK_FALSE(splits_parent(NcclOptions().split_share(true), {}));
  CHECK(splits_parent(NcclOptions().split_share(true), gpu));
  CHECK(splits_parent(NcclOptions().split_share(false), gpu));
}

TEST_CASE("the future of a hook waits for any device's stream", "[own_backend]") {
  using testing::toy::Device;
  const auto tensor = torch::empty({4}, at::TensorOptions().device(at::kPrivateUse1));
  GradBucket bucket(0, true, tensor, {tensor}, {});
  Device::get().forget();
  hooks::noop()(bucket)->wait();
  CHECK(Device::get().waits.size() == 1);
}

}  // namespace ddp
