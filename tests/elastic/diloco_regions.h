// Regions of DiLoCo that are threads of a test, with a coordinator beside them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <ddp/backend.h>
#include <ddp/diloco.h>
#include <ddp/process_group.h>
#include <torch/torch.h>

#include "elastic/test_coordinator.h"
#include "support/archives.h"
#include "support/ranks.h"
#include "support/relay_backend.h"
#include "training/diloco_simulation.h"

namespace ddp::diloco_regions {

using namespace diloco_simulation;
using testing::Rank;
using testing::run_ranks;
using testing::TestCoordinator;

struct Region {
  int64_t number = 0;
  DiLoCoOptions options;
};

/// That of a rank in a world of regions of equal sizes; the last rank of each is the leader.
inline Region place(
    const Rank& self, int per_region, const TestCoordinator& coordinator, DiLoCoOptions options,
    std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  const int number = self.rank / per_region;
  if (per_region > 1) options.local(split_group(number, 0, self.group));
  if (self.rank % per_region == per_region - 1) options.coordinator(coordinator.address());
  options.group(ProcessGroupOptions().backend("gloo").timeout(timeout));
  return {number, options};
}

/// Each rank is a region, over the links of use_faulty_links().
inline DiLoCoOptions over_faulty_links(
    const Rank& self, const TestCoordinator& coordinator, const DiLoCoOptions& given,
    std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  auto options = place(self, 1, coordinator, given, timeout).options;
  return options.group(ProcessGroupOptions(options.group()).backend("faulty"));
}

inline void train_until(DiLoCo& diloco, const Tensors& parameters, int64_t region, int64_t last) {
  while (diloco.step() < last) {
    take_inner_step(parameters, region, diloco.step());
    diloco.average_parameters(parameters);
  }
}

inline at::Tensor saved(const DiLoCo& diloco, const char* key) {
  at::Tensor value;
  testing::reread(diloco).read(key, value);
  return value;
}

struct Ended {
  at::Tensor parameters, outer, momentum;
  int64_t round = 0;
  int64_t begins = 0;  // of a region that joined
  double part = 0;
  std::vector<int64_t> regions;
};

inline Ended ended(const DiLoCo& diloco, const Tensors& parameters) {
  Ended result;
  result.parameters = flat_of(parameters);
  result.outer = saved(diloco, "outer");
  result.momentum = saved(diloco, "momentum");
  result.round = diloco.round();
  result.regions = diloco.stats().regions;
  return result;
}

/// Gloo, as a backend "faulty" whose calls a test may disturb on some rank.
class FaultyLink : public testing::Relay {
 public:
  using Sizes = std::vector<int64_t>;

  /// Set before the first group is made. Each may throw.
  struct Faults {
    std::function<void(int rank, const at::Tensor&sent, c10d::Work&work)> in_gather, in_broadcast,
        in_send;
    std::function<void(const at::Tensor& sent)> before_send;
  };
  static Faults& faults() {
    static Faults faults;
    return faults;
  }

  explicit FaultyLink(const BackendSetup& setup) : Relay("faulty", testing::make_loopback(setup)) {}

  WorkPtr run(Collective collective) override {
    const auto kind = collective.kind;
    const auto sent = kind == Kind::Barrier ? at::Tensor() : collective.first();
    auto work = Relay::run(std::move(collective));
    const auto& fault = kind == Kind::Broadcast   ? faults().in_broadcast
                        : kind == Kind::AllGather ? faults().in_gather
                                                  : nullptr;
    if (fault) fault(getRank(), sent, *work);
    return work;
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    if (faults().before_send) faults().before_send(tensors[0]);
    auto work = inner().send(tensors, to, tag);
    if (faults().in_send) faults().in_send(getRank(), tensors[0], *work);
    return work;
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return inner().recv(tensors, from, tag);
  }
};

inline void use_faulty_links(FaultyLink::Faults faults) {
  [[maybe_unused]] static const bool once = [] {
    const auto make = [](const BackendSetup& setup) {
      return c10::make_intrusive<FaultyLink>(setup);
    };
    register_backend("faulty", BackendDescription().devices({at::kCPU}).make(make));
    return true;
  }();
  FaultyLink::faults() = std::move(faults);
}

}  // namespace ddp::diloco_regions
