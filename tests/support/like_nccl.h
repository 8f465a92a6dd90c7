// A backend of CPU tensors that behaves like ProcessGroupNCCL of LibTorch 2.11. What differs from
// other backends, and what tests without a GPU need it for:
// - collectives run on a device, one after the other; wait() makes the stream wait, not the host;
// - isSuccess() throws; after an abort isCompleted() is true, without an exception;
// - a watchdog completes getFutureResult(), and ends what lasts longer than the timeout;
// - the destructor aborts, unless shutdown() was called, which waits without a bound.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/jit_type.h>
#include <ddp/internal/light_work.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/backends/shm/backend/fallback_backend.h"
#include "comm/group/monitored_group.h"
#include "comm/monitor/job_monitor.h"
#include "comm/monitor/rank_report.h"
#include "support/ranks.h"

namespace ddp::testing {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using std::chrono::milliseconds;

/// A collective's handle without its tensors. Where nothing else has the collective, it has ended.
class LightDeviceWork : public c10d::Work {
 public:
  explicit LightDeviceWork(const WorkPtr& whole) : whole_(whole) {}

  bool isCompleted() override {
    const auto whole = whole_.lock();
    return !whole || whole->isCompleted();
  }
  std::exception_ptr exception() const override {
    const auto whole = whole_.lock();
    return whole ? whole->exception() : nullptr;
  }

 private:
  c10::weak_intrusive_ptr<c10d::Work> whole_;
};

/// A collective on the device. Its results appear in the caller's tensors when it ends there.
class DeviceWork : public c10d::Work, public KeepsTensors {
 public:
  DeviceWork(WorkPtr carried, std::vector<at::Tensor> targets, std::vector<at::Tensor> staged)
      : carried_(std::move(carried)), targets_(std::move(targets)), staged_(std::move(staged)) {}

  bool isCompleted() override {
    ++polls;
    return is_over();
  }
  bool isSuccess() const override { TORCH_CHECK(false, "isSuccess() is deprecated"); }
  std::exception_ptr exception() const override { return failure; }
  std::vector<at::Tensor> result() override { return targets_; }
  void synchronize() override {}
  bool wait(milliseconds timeout) override {
    // With a limit NCCL's aborts the communicator when that is over.
    TORCH_CHECK(timeout == kNoTimeout || is_over(), "timed out in blocking wait");
    if (blocks_host && !is_over()) {
      carried_->wait(timeout);  // which throws for a rank that does not come
      wait_until_ended();
    }
    if (failure) std::rethrow_exception(failure);
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return result_; }
  WorkPtr without_tensors() override {
    return c10::make_intrusive<LightDeviceWork>(WorkPtr::unsafe_reclaim_from_nonowning(this));
  }

  /// For the host, as a synchronization with the device: nothing bounds it.
  void wait_until_ended() {
    std::unique_lock lock(mutex_);
    ended_cv_.wait(lock, [this] { return ended_; });
  }
  /// As isCompleted(), for those that are no poll of the library.
  bool is_over() const {
    const std::lock_guard lock(mutex_);
    return failure || ended_;
  }
  /// Not where a rank has ended: NCCL's kernels wait for it.
  bool has_arrived() { return carried_->isCompleted() && !carried_->exception(); }
  void end(bool writes, c10d::WorkResult result) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; writes && i < targets_.size(); ++i) targets_[i].copy_(staged_[i]);
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    ended_cv_.notify_all();
    if (!result_->completed()) result_->markCompleted(static_cast<int64_t>(result));
  }

  const std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  std::atomic<int> polls{0};
  bool blocks_host = false;    // so that results are there after wait()
  std::exception_ptr failure;  // an error of the device, which only exception() reports

  // A weak reference keeps the members.
  void release_resources() override {
    carried_.reset();
    targets_.clear();
    staged_.clear();
  }

 private:
  WorkPtr carried_;
  std::vector<at::Tensor> targets_, staged_;
  mutable std::mutex mutex_;
  std::condition_variable ended_cv_;
  bool ended_ = false;
  const c10::intrusive_ptr<c10::ivalue::Future> result_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
};

class LikeNccl : public backends::shm::FallbackBackend {
 public:
  LikeNccl(int rank, int size, c10::intrusive_ptr<c10d::Backend> carrier)
      : FallbackBackend(
            rank, size, /*memory=*/nullptr,
            std::make_shared<backends::shm::GlooCarrier>(std::move(carrier))),
        device_([this] { serve(); }) {}
  ~LikeNccl() override {
    if (!is_over_) abort();
    stop();
  }
  const std::string getBackendName() const override { return "nccl"; }

  WorkPtr run(Collective c) override {
    if (c.kind == Kind::Barrier) {
      auto work = queue(FallbackBackend::run(std::move(c)), {}, {});
      work->blocks_host = true;
      return work;
    }
    if (c.kind == Kind::ReduceScatter) average = c.op == c10d::ReduceOp::AVG;
    if (c.kind != Kind::AllReduce && c.kind != Kind::Broadcast) {
      return FallbackBackend::run(std::move(c));
    }
    const auto targets = c.out;
    const auto staged = c.in = c.out = copies(targets);
    const bool reduces = c.kind == Kind::AllReduce;
    if (reduces) average = c.op == c10d::ReduceOp::AVG;
    if (reduces && average) {
      for (const auto& t : staged) t.div_(getSize());
      c.op = c10d::ReduceOp::SUM;
    }
    auto work = queue(FallbackBackend::run(std::move(c)), targets, staged);
    if (reduces) latest = work;
    return work;
  }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalesced_.emplace(); }
  WorkPtr endCoalescing() override {
    ++batches;
    auto works = std::move(*coalesced_);
    coalesced_.reset();
    return queue(combine_works(std::move(works)), {}, {});
  }
  WorkPtr send(Tensors& t, int dst, int tag) override {
    return message(FallbackBackend::send(t, dst, tag));
  }
  WorkPtr recv(Tensors& t, int src, int tag) override {
    return message(FallbackBackend::recv(t, src, tag));
  }

  /// As `loss.item()`: waits for the device, and nothing but an abort ends that.
  void synchronize_device() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty(); });
  }

  void shutdown() override {
    synchronize_device();
    is_over_ = true;
    ++shutdowns;
  }
  /// NCCL's synchronizes with the device, which other communicators may hold up.
  void abort() override {
    is_over_ = true;
    {
      const std::lock_guard lock(mutex_);
      aborted_ = true;
      changed_.notify_all();
    }
    if (beside) beside->synchronize_device();
  }

  milliseconds watchdog_timeout = std::chrono::minutes(10);
  c10::intrusive_ptr<DeviceWork> latest;  // of an all-reduce
  bool on_stream = false;      // wait() returns at once; else it waits, so that results are there
  LikeNccl* beside = nullptr;  // another communicator of the same device
  std::atomic<int> shutdowns{0}, batches{0};
  bool average = false;  // the latest reduction was an average

 private:
  static Tensors copies(const Tensors& tensors) {
    const at::NoGradGuard no_grad;
    Tensors copies;
    for (const auto& t : tensors) copies.push_back(t.clone());
    return copies;
  }

  WorkPtr message(WorkPtr work) {
    if (!coalesced_) return queue(std::move(work), {}, {});
    coalesced_->push_back(std::move(work));
    return {};
  }

  c10::intrusive_ptr<DeviceWork> queue(WorkPtr carried, Tensors targets, Tensors staged) {
    auto work =
        c10::make_intrusive<DeviceWork>(std::move(carried), std::move(targets), std::move(staged));
    work->blocks_host = !on_stream;
    const std::lock_guard lock(mutex_);
    queue_.push_back(work);
    changed_.notify_all();
    return work;
  }

  /// The device, and the watchdog.
  void serve() {
    std::unique_lock lock(mutex_);
    while (!stops_) {
      changed_.wait_for(lock, milliseconds(queue_.empty() ? 100 : 1));
      while (!queue_.empty()) {
        const auto work = queue_.front();
        const bool late = std::chrono::steady_clock::now() - work->since > watchdog_timeout;
        if (late) {
          work->failure = std::make_exception_ptr(
              C10_BUILD_ERROR(DistBackendError, "Watchdog caught collective operation timeout"));
          aborted_ = true;
        }
        if (!aborted_ && !work->has_arrived()) break;
        work->end(
            /*writes=*/!aborted_, late ? c10d::WorkResult::TIMEOUT : c10d::WorkResult::SUCCESS);
        queue_.pop_front();
      }
      changed_.notify_all();
    }
  }
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
      changed_.notify_all();
    }
    device_.join();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<DeviceWork>> queue_;
  std::optional<std::vector<WorkPtr>> coalesced_;
  std::atomic<bool> is_over_{false}, aborted_{false};
  bool stops_ = false;
  std::thread device_;
};

/// The backend over the group of a rank-thread.
inline c10::intrusive_ptr<LikeNccl> like_nccl(const Rank& self) {
  return c10::make_intrusive<LikeNccl>(self.rank, self.size, self.group->getBackend(at::kCPU));
}

/// The monitor of a job of the test's ranks, which share a store, and no sockets.
inline std::shared_ptr<JobMonitor> job_like_nccl(const Rank& self) {
  JobMonitor::Setup setup;
  setup.rank = self.rank;
  setup.size = self.size;
  setup.store = c10::make_intrusive<c10d::PrefixStore>("job like NCCL", self.store);
  setup.store->set(ddp::report_key(self.rank), std::vector<uint8_t>{'\t'});
  return std::make_shared<JobMonitor>(setup);
}

/// A group of this library over the backend, as a part of the job.
inline c10::intrusive_ptr<MonitoredGroup> monitored_like_nccl(
    const c10::intrusive_ptr<LikeNccl>& backend, const Rank& self,
    const std::shared_ptr<JobMonitor>& job, const std::string& key = "",
    milliseconds timeout = std::chrono::seconds(20), std::optional<c10::Device> device_id = {}) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>("like NCCL" + key, self.store);
  const auto group = MonitoredGroup::make(store, self.rank, self.size);
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::NCCL, backend);
  group->setDefaultBackend("nccl");
  group->setGroupName("like NCCL" + key);
  GroupRecipe recipe;
  recipe.timeout = timeout;
  recipe.device_id = device_id;
  for (int rank = 0; rank < self.size; ++rank) recipe.world_ranks.push_back(rank);
  recipe.job = job;
  group->start_monitor(recipe, key);
  return group;
}

}  // namespace ddp::testing
