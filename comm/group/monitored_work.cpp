#include "group/monitored_work.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "group/monitored_group.h"
#include "monitor/waits/message_place.h"

namespace ddp {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Place = std::function<std::string()>;

/// The handle of a collective. Its wait() without a limit waits with the group's monitor.
class MonitoredWork : public c10d::Work {
 public:
  MonitoredWork(
      c10d::ProcessGroup& group, WorkPtr work, std::shared_ptr<GroupMonitor> monitor, Place where,
      bool waits_on_stream, Peers peers)
      : c10d::Work(-1, work->retrieveOpType()),
        group_(ProcessGroup::unsafe_reclaim_from_nonowning(&group)),
        work_(std::move(work)),
        monitor_(std::move(monitor)),
        where_(std::move(where)),
        waits_on_stream_(waits_on_stream),
        peers_(peers) {}

  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout != kNoTimeout) return work_->wait(timeout);
    waits_on_stream_ ? monitor_->wait_on_stream(*work_, where_)
                     : monitor_->wait(*work_, where_, peers_);
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
  const Place where_;
  const bool waits_on_stream_;
  const Peers peers_;
};

WorkPtr start_monitored(
    const Place& where, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<WorkPtr()> start, Peers peers, WaitOn wait_on) {
  const auto monitor = own_monitor_of(group);
  if (!monitor || group.getSize() == 1) return start();
  WorkPtr work;
  const auto doing = [&] { return ddp::str("starting ", where()); };
  monitor->abort_on_error(doing, [&] { work = start(); });
  const bool waits_on_stream =
      wait_on == WaitOn::Stream && capabilities_of(group, device).waits_on_stream;
  return c10::make_intrusive<MonitoredWork>(
      group, std::move(work), monitor, where, waits_on_stream, peers);
}

}  // namespace

WorkPtr monitored(
    const char* name, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<WorkPtr()> start, Peers peers, WaitOn wait_on) {
  const auto where = [name] { return std::string(name); };
  return start_monitored(where, group, device, start, peers, wait_on);
}

WorkPtr monitored_message(
    bool sends, int peer, int tag, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<WorkPtr()> start) {
  const auto monitor = own_monitor_of(group);
  if (monitor) peer = monitor->job_rank(peer);
  const auto where = [sends, peer, tag] { return message_place(sends, peer, tag); };
  return start_monitored(where, group, device, start, Peers::Some, WaitOn::Stream);
}

}  // namespace ddp
