#include "fallback_backend.h"

#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ddp/internal/check.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backends/gloo/gloo.h"
#include "base/executor.h"
#include "shm_work.h"
#include "store/bounded_store.h"

namespace ddp::backends::shm {
namespace {

/// The handle of a call that another thread starts.
class QueuedWork : public c10d::Work {
 public:
  QueuedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs)
      : c10d::Work(rank, type),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {}

  void end(const std::exception_ptr& error) noexcept {
    finish(error);
    complete_future(*future_, outputs_, error);
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const std::vector<at::Tensor> outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

void end_with(const c10::intrusive_ptr<QueuedWork>& work, const GlooCarrier::WorkPtr& of_gloo) {
  if (!of_gloo) return work->end(nullptr);
  of_gloo->getFuture()->addCallback([work](c10::ivalue::Future& done) {
    work->end(done.hasError() ? done.exception_ptr() : nullptr);
  });
}

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
  OnDemand(Setup of_gloo, OnFailure on_failure)
      : setup(std::move(of_gloo)), on_failure(std::move(on_failure)) {
    // Without the deadline of making the group, and the group that this one was made of.
    setup.store = bounded(setup.store)->unbounded();
    setup.parent = nullptr;
  }

  /// Called on the executor's thread.
  ///
  /// \throws c10::DistBackendError  after abort().
  BackendPtr connect() {
    Setup in_time;
    {
      const std::lock_guard lock(mutex);
      check_usable();
      if (gloo) return gloo;
      in_time = setup;
    }
    // A connection of its own: calls of one wait for each other.
    in_time.store = c10::make_intrusive<StoppableStore>(clone_of(setup.store), is_aborted);
    in_time.connect_by = Deadline(in_time.connect_by.timeout());
    auto made = make_gloo(in_time);
    const std::lock_guard lock(mutex);
    check_usable();
    made->setTimeout(setup.timeout);
    return gloo = made;
  }
  void check_usable() const {
    DDP_CHECK_WITH(
        DistBackendError, !*is_aborted,
        "shm: expected a working process group, but it failed, was aborted or destroyed on rank ",
        setup.rank, ". Make a new group.");
  }
  /// Ends the running calls, and fails later ones.
  void abort() {
    BackendPtr made;
    {
      const std::lock_guard lock(mutex);
      *is_aborted = true;
      made = gloo;
    }
    if (made) made->abort();
  }
  /// Ranks that did not all connect may meet in different calls, so this ends the group.
  void fail_to_connect(const std::exception_ptr& error) {
    OnFailure tell;
    {
      const std::lock_guard lock(mutex);
      if (gloo || *is_aborted) return;
      tell = on_failure;
    }
    abort();
    if (tell) tell(text_of(error));
  }

  std::mutex mutex;  // guards the members below
  Setup setup;
  OnFailure on_failure;
  BackendPtr gloo;
  std::optional<Executor> executor;
  std::atomic<int> queued{0};  // calls that the executor has not started; raised with the mutex
  const std::shared_ptr<std::atomic<bool>> is_aborted =
      std::make_shared<std::atomic<bool>>(false);  // read without the mutex
};

GlooCarrier::GlooCarrier(BackendPtr gloo) : connected_(std::move(gloo)) {}

GlooCarrier::GlooCarrier(const Setup& setup, OnFailure on_failure)
    : on_demand_(std::make_shared<OnDemand>(setup, std::move(on_failure))) {}

GlooCarrier::~GlooCarrier() {
  if (!on_demand_) return;
  on_demand_->abort();
  // A thread that connects sees that soon, but for a socket that does not answer.
  constexpr std::chrono::seconds kPatience{1};
  if (on_demand_->executor) on_demand_->executor->close(kPatience);
}

GlooCarrier::WorkPtr GlooCarrier::start(
    c10d::OpType type, std::vector<at::Tensor> outputs, Call call) {
  owner_.check("shm");
  ++calls_;
  if (connected_) return call(*connected_);
  auto& state = *on_demand_;
  const auto work = c10::make_intrusive<QueuedWork>(state.setup.rank, type, std::move(outputs));
  const auto run = [work, call, own = on_demand_, of_caller = at::ThreadLocalState()]() mutable {
    const at::ThreadLocalStateGuard as_caller(of_caller);
    WorkPtr of_gloo;
    const auto error = exception_of([&] { of_gloo = call(*own->connect()); });
    if (error) own->fail_to_connect(error);
    call = nullptr;
    --own->queued;  // from here on calls need this thread no more, which callbacks may hold up
    error ? work->end(error) : end_with(work, of_gloo);
  };
  std::unique_lock lock(state.mutex);
  state.check_usable();
  if (state.gloo && state.queued == 0) {
    const auto gloo = state.gloo;
    lock.unlock();
    return call(*gloo);
  }
  if (!state.executor) state.executor.emplace();
  ++state.queued;
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
