#include "gloo_carrier.h"

#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backends/gloo/gloo.h"
#include "base/executor.h"
#include "store/bounded_store.h"

namespace ddp::backends::shm {
namespace {

/// The handle of a call on another thread.
class QueuedWork : public c10d::Work {
 public:
  QueuedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs)
      : c10d::Work(rank, type),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {}

  void end(const std::exception_ptr& error) {
    finish(error);
    error ? future_->setError(error) : future_->markCompleted(c10::IValue(outputs_));
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const std::vector<at::Tensor> outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// A store whose waits end when a flag is set: ranks that connect wait in it for those that never
/// come.
class StoppableStore : public c10d::PrefixStore {
 public:
  StoppableStore(
      const c10::intrusive_ptr<c10d::Store>& store, std::shared_ptr<std::atomic<bool>> is_stopped)
      : c10d::PrefixStore("", store), is_stopped_(std::move(is_stopped)) {}

  using c10d::PrefixStore::wait;
  void wait(
      const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    constexpr std::chrono::milliseconds kPoll{10};
    const Deadline deadline(timeout);
    while (!check(keys)) {
      DDP_CHECK_WITH(DistStoreError, !*is_stopped_, "the group was aborted or destroyed");
      DDP_CHECK_WITH(
          DistStoreError, !deadline.passed(), "a rank did not connect within ", timeout.count(),
          " ms");
      std::this_thread::sleep_for(kPoll);
    }
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }

 private:
  const std::shared_ptr<std::atomic<bool>> is_stopped_;
};

}  // namespace

/// Shared with the calls: one that connects may outlive the carrier.
struct GlooCarrier::OnDemand {
  explicit OnDemand(Setup of_gloo) : setup(std::move(of_gloo)) {}

  /// \throws c10::DistBackendError  after abort().
  BackendPtr connect() {
    {
      const std::lock_guard lock(mutex);
      check_usable();
      if (gloo) return gloo;
    }
    auto in_time = setup;
    // A connection of its own: calls of one wait for each other.
    const auto own_connection = bounded(setup.store)->clone();
    in_time.store = c10::make_intrusive<StoppableStore>(own_connection, is_aborted);
    in_time.connect_by = Deadline(setup.connect_by.timeout());
    auto made = make_gloo(in_time);
    const std::lock_guard lock(mutex);
    check_usable();
    made->setTimeout(setup.timeout);
    return gloo = made;
  }
  void check_usable() const {
    DDP_CHECK_WITH(
        DistBackendError, !*is_aborted,
        "shm: expected a working process group, but it was aborted or destroyed on rank ",
        setup.rank, ". Make a new group.");
  }
  /// Ends the running call, and fails later ones.
  void abort() {
    BackendPtr made;
    {
      const std::lock_guard lock(mutex);
      *is_aborted = true;
      made = gloo;
    }
    if (made) made->abort();
  }

  std::mutex mutex;  // guards the members below
  Setup setup;
  BackendPtr gloo;
  const std::shared_ptr<std::atomic<bool>> is_aborted = std::make_shared<std::atomic<bool>>(false);
  std::optional<Executor> executor;
};

GlooCarrier::GlooCarrier(BackendPtr gloo) : connected_(std::move(gloo)) {}

GlooCarrier::GlooCarrier(const Setup& setup) : on_demand_(std::make_shared<OnDemand>(setup)) {}

GlooCarrier::~GlooCarrier() {
  if (on_demand_) on_demand_->abort();
}

GlooCarrier::WorkPtr GlooCarrier::start(
    c10d::OpType type, std::vector<at::Tensor> outputs, Call call) {
  ++calls_;
  if (connected_) return call(*connected_);
  auto& state = *on_demand_;
  const auto work = c10::make_intrusive<QueuedWork>(state.setup.rank, type, std::move(outputs));
  const auto run = [work, call = std::move(call), own = on_demand_]() mutable {
    std::exception_ptr error;
    try {
      const auto of_gloo = call(*own->connect());
      if (of_gloo) of_gloo->wait();
    } catch (...) {
      error = std::current_exception();
    }
    call = nullptr;
    work->end(error);
  };
  const std::lock_guard lock(state.mutex);
  state.check_usable();
  if (!state.executor) state.executor.emplace();
  state.executor->push(run);
  return work;
}

void GlooCarrier::abort() { connected_ ? connected_->abort() : on_demand_->abort(); }

void GlooCarrier::shutdown() { connected_ ? connected_->shutdown() : on_demand_->abort(); }

void GlooCarrier::set_timeout(std::chrono::milliseconds timeout) {
  if (connected_) return connected_->setTimeout(timeout);
  const std::lock_guard lock(on_demand_->mutex);
  on_demand_->setup.timeout = timeout;
  if (on_demand_->gloo) on_demand_->gloo->setTimeout(timeout);
}

c10::intrusive_ptr<c10d::Backend::Options> GlooCarrier::options() const {
  if (connected_) return connected_->getBackendOptions();
  const std::lock_guard lock(on_demand_->mutex);
  auto options = c10::make_intrusive<c10d::Backend::Options>("shm", on_demand_->setup.timeout);
  options->group_name = on_demand_->setup.group_name;
  options->global_ranks_in_group = on_demand_->setup.global_ranks;
  return options;
}

}  // namespace ddp::backends::shm
