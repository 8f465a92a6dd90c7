// A backend without communication: it records each call, and completes it at once.
#pragma once

#include <string>
#include <vector>

#include <ddp/collective_backend.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp::testing {

/// A log that backends and tests append to in the order of events.
using Events = std::vector<std::string>;

/// Leaves tensors unchanged, as if all other ranks had contributed zeros. Records "allreduce 120"
/// and the like, with the number of elements.
class RecordingBackend : public CollectiveBackend {
 public:
  RecordingBackend(int rank, int size, Events& events)
      : CollectiveBackend(rank, size), events_(events) {}

  const std::string getBackendName() const override { return "recording"; }

  WorkPtr run(Collective collective) override {
    TORCH_CHECK(
        collective.kind == Kind::AllReduce || collective.kind == Kind::Broadcast,
        "recording: expected an all-reduce or a broadcast");
    int64_t elements = 0;
    for (const auto& t : collective.in) elements += t.numel();
    const bool reduces = collective.kind == Kind::AllReduce;
    events_.push_back((reduces ? "allreduce " : "broadcast ") + std::to_string(elements));
    return c10::make_intrusive<Done>();
  }
  void shutdown() override { events_.push_back("shutdown"); }
  void abort() override { events_.push_back("abort"); }

 private:
  class Done : public c10d::Work {
   public:
    Done() { finish(); }
  };

  Events& events_;
};

/// A process group whose backend for CPU tensors is `backend`.
inline c10::intrusive_ptr<c10d::ProcessGroup> group_over(
    const c10::intrusive_ptr<c10d::Backend>& backend,
    const c10::intrusive_ptr<c10d::Store>& store = c10::make_intrusive<c10d::HashStore>()) {
  const auto backend_type = c10d::ProcessGroup::BackendType::CUSTOM;
  auto group =
      c10::make_intrusive<c10d::ProcessGroup>(store, backend->getRank(), backend->getSize());
  group->setBackend(c10::DeviceType::CPU, backend_type, std::optional(backend));
  group->setDefaultBackend(backend_type);
  group->setGroupName(backend->getBackendName());
  return group;
}

/// A process group of `size` ranks in which this process is `rank` and the others do not exist.
inline c10::intrusive_ptr<c10d::ProcessGroup> recording_group(int rank, int size, Events& events) {
  return group_over(c10::make_intrusive<RecordingBackend>(rank, size, events));
}

}  // namespace ddp::testing
