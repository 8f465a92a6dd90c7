#include "group/monitored_work.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "group/monitored_group.h"

namespace ddp {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// The handle of a collective. Its wait() without a limit waits with the group's monitor.
class MonitoredWork : public c10d::Work {
 public:
  MonitoredWork(
      c10d::ProcessGroup& group, WorkPtr work, std::shared_ptr<GroupMonitor> monitor,
      const char* name, bool waits_on_stream, Peers peers)
      : c10d::Work(-1, work->retrieveOpType()),
        group_(ProcessGroup::unsafe_reclaim_from_nonowning(&group)),
        work_(std::move(work)),
        monitor_(std::move(monitor)),
        name_(name),
        waits_on_stream_(waits_on_stream),
        peers_(peers) {}

  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout != kNoTimeout) return work_->wait(timeout);
    const auto where = [this] { return std::string(name_); };
    waits_on_stream_ ? monitor_->wait_on_stream(*work_, where)
                     : monitor_->wait(*work_, where, peers_);
    return true;
  }

  bool isCompleted() override { return work_->isCompleted(); }
  // Not of the backend's isSuccess(): NCCL's throws.
  bool isSuccess() const override { return work_->isCompleted() && !work_->exception(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
  void blockCurrentStream() override { work_->blockCurrentStream(); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return work_->getFutureResult();
  }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  const ProcessGroup group_;  // aborted if a wait fails
  const WorkPtr work_;
  const std::shared_ptr<GroupMonitor> monitor_;
  const char* const name_;
  const bool waits_on_stream_;
  const Peers peers_;
};

}  // namespace

WorkPtr monitored(
    const char* name, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<WorkPtr()> start, Peers peers, WaitOn wait_on) {
  const auto monitor = own_monitor_of(group);
  if (!monitor || group.getSize() == 1) return start();
  WorkPtr work;
  const auto doing = [name] { return ddp::str("starting ", name); };
  monitor->abort_on_error(doing, [&] { work = start(); });
  const bool waits_on_stream =
      wait_on == WaitOn::Stream && capabilities_of(group, device).waits_on_stream;
  return c10::make_intrusive<MonitoredWork>(
      group, std::move(work), monitor, name, waits_on_stream, peers);
}

}  // namespace ddp
