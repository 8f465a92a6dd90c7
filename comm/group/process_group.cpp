#include <ddp/process_group.h>

#include <cstdlib>
#include <exception>
#include <mutex>

#include <ddp/internal/check.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/text.h>

#include "base/environment.h"
#include "group/group_builder.h"
#include "group/monitored_group.h"
#include "monitor/abort_calls.h"

namespace ddp {
namespace {

// The only global state of the library.
struct Default {
  std::mutex mutex;
  ProcessGroup group;
};

Default& the_default() {
  static Default instance;
  return instance;
}

/// Calls `use` with the default group, which no other thread uses meanwhile.
template <typename Use>
auto with_default(const Use& use) {
  auto& slot = the_default();
  const std::lock_guard lock(slot.mutex);
  return use(slot.group);
}

ProcessGroup take_default() {
  return with_default([](ProcessGroup& slot) { return std::exchange(slot, {}); });
}

// How long the end of a process waits for aborts that still run.
constexpr std::chrono::seconds kAbortsAtExit{10};

// Ends a group of GPUs that main() did not destroy before CUDA ends: functions of atexit() run in
// the reverse order, and CUDA's was added when the group found its GPU. The slot's own destructor
// would run after it.
void end_before_cuda(c10d::ProcessGroup& group) {
  bool uses_cuda = false;
  for (const auto& device : group.getDeviceTypes()) uses_cuda |= device.is_cuda();
  if (!uses_cuda) return;
  static const int added = std::atexit([] {
    take_default().reset();
    wait_for_aborts(kAbortsAtExit);
  });
  (void)added;
}

// Passes whose status no later pass reads are settled before; what they throw, after.
void end(c10d::ProcessGroup& group) {
  const auto monitor = own_monitor_of(group);
  std::exception_ptr problem;
  if (monitor && !monitor->aborted() && std::uncaught_exceptions() == 0) {
    problem = exception_of([&] { monitor->settle_job(); });
  }
  // NCCL warns of communicators that are only destroyed.
  group.shutdown();
  if (problem) std::rethrow_exception(problem);
}

}  // namespace

ProcessGroup make_process_group(const ProcessGroupOptions& options) { return build_group(options); }

ProcessGroup init_process_group(const ProcessGroupOptions& options) {
  DDP_CHECK(
      !is_initialized(),
      "init_process_group: expected no default group, but there is one. Call "
      "destroy_process_group() first, or new_group() for a further group.");
  const auto group = build_group(options);
  replace_default_group(group);
  return group;
}

ProcessGroup replace_default_group(ProcessGroup group) {
  if (group) end_before_cuda(*group);
  return with_default([&](ProcessGroup& slot) { return std::exchange(slot, std::move(group)); });
}

void destroy_process_group() {
  if (const auto last = take_default()) end(*last);
}

void destroy_process_group(const ProcessGroup& group) {
  DDP_CHECK(
      group,
      "destroy_process_group: expected a group this process is a member of, got an empty one.",
      " new_group() gives it to ranks that are not in the group: let those skip the call.");
  with_default([&](ProcessGroup& slot) {
    if (slot == group) slot.reset();
  });
  end(*group);
}

void abort_process_group(const GroupArg& group_arg) {
  const auto group = group_arg.get();
  const auto monitor = own_monitor_of(*group);
  DDP_CHECK(
      monitor, "abort_process_group: expected a group that this library made, got another one on ",
      "rank ", group->getRank(), " of ", group->getSize(), ". Call its own abort().");
  if (group->getSize() == 1) return group->abort();
  monitor->fail(ddp::str(monitor->rank_text(), " called abort_process_group"));
}

bool is_initialized() {
  return with_default([](const ProcessGroup& slot) { return static_cast<bool>(slot); });
}

ProcessGroup default_group() {
  auto group = with_default([](const ProcessGroup& slot) { return slot; });
  DDP_CHECK(
      group,
      "process group: expected a default group, got none. Call ddp::init_process_group() first, or "
      "pass a group.");
  return group;
}

bool is_launched() { return read_environment(process_variable).rank.has_value(); }

ProcessGroup GroupArg::get() const {
  if (!given_) return default_group();
  DDP_CHECK(
      group_,
      "process group: expected a group this process is a member of, got an empty one. new_group() "
      "gives it to ranks that are not in the group: let those skip the call.");
  return group_;
}

int get_rank(const GroupArg& group) { return group.get()->getRank(); }

bool is_main(const GroupArg& group) { return get_rank(group) == 0; }

int get_world_size(const GroupArg& group) { return group.get()->getSize(); }

int get_local_rank() {
  const auto environment = read_environment(process_variable);
  if (!is_initialized()) return local_rank_of(environment, 1);
  const auto group = default_group();
  const auto* own = dynamic_cast<const MonitoredGroup*>(group.get());
  return local_rank_of(
      environment, group->getSize(), own != nullptr ? own->recipe().local_rank : std::nullopt);
}

}  // namespace ddp
