// A small trainer over the backend that behaves like NCCL.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include <ddp/internal/reducer.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ddp/internal/forward_count.h>
#include "reducer/passes.h"
#include "support/like_nccl.h"
#include "support/ranks.h"

namespace ddp::testing {

inline ProcessGroup group_over(const c10::intrusive_ptr<LikeNccl>& backend, const Rank& self) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(
      c10::make_intrusive<c10d::PrefixStore>("ahead", self.store), self.rank, self.size);
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::NCCL, backend);
  group->setDefaultBackend("nccl");
  group->setGroupName("ahead");
  return group;
}

/// The part of a wrapper that counts forward passes.
struct CountsForwards : PassCompanion {
  explicit CountsForwards(std::shared_ptr<GroupMonitor> monitor) : count(std::move(monitor)) {}

  void start(int) override {}
  void finish(c10::function_ref<void(c10d::Work&)>) override {}
  uint64_t forwards() const override { return count.since_restart(); }
  void end() override { count.restart(); }

  ForwardCount count;
};

/// Two parameters and the reducer of their gradients.
struct Trainer {
  explicit Trainer(const Rank& self, ReducerOptions options = ReducerOptions().stats_every(0))
      : rank(self.rank),
        backend(like_nccl(self)),
        group(group_over(backend, self)),
        monitor(monitor_of(group)),
        companion(monitor),
        reducer({{"a", a}, {"b", b}}, group, options, monitor) {
    reducer.set_companion(companion);
  }

  /// \return  the text of the error that it throws; "" for none.
  std::string step(bool skip_b = false) {
    a.mutable_grad().reset();
    b.mutable_grad().reset();
    companion.count.begin();
    try {
      testing::reduced_backward(reducer, [&] {
        const auto loss = skip_b ? a.sum() : a.sum() + b.sum();
        return loss * (rank + 1.0);
      });
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  }

  /// Runs until the buckets are final; later collectives make only the stream wait.
  void begin() {
    for (int i = 0; i < 2; ++i) step();
    backend->on_stream = true;
  }

  /// A forward pass that throws.
  void fail_forward() {
    companion.count.begin();
    companion.count.fail("forward threw on " + monitor->rank_text() + ": index 7 is out of bounds");
  }

  int rank;
  at::Tensor a = parameter(), b = parameter();
  c10::intrusive_ptr<LikeNccl> backend;
  ProcessGroup group;
  std::shared_ptr<GroupMonitor> monitor;
  CountsForwards companion;
  Reducer reducer;
};

}  // namespace ddp::testing
