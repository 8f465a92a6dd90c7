#include <ddp/process_group.h>

#include <mutex>
#include <utility>

#include <ddp/internal/check.h>

#include "base/environment.h"
#include "group/group_builder.h"

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

}  // namespace

ProcessGroup make_process_group(const ProcessGroupOptions& options) { return build_group(options); }

ProcessGroup init_process_group(const ProcessGroupOptions& options) {
  DDP_CHECK(
      !is_initialized(),
      "init_process_group: expected no default group, but there is one. Call "
      "destroy_process_group() first, or new_group() for a further group.");
  auto group = build_group(options);
  auto& slot = the_default();
  std::lock_guard<std::mutex> lock(slot.mutex);
  slot.group = std::move(group);
  return slot.group;
}

void destroy_process_group() {
  ProcessGroup last;
  {
    auto& slot = the_default();
    std::lock_guard<std::mutex> lock(slot.mutex);
    std::swap(last, slot.group);
  }
  // NCCL warns of communicators that are only destroyed.
  if (last) last->shutdown();
}

bool is_initialized() {
  auto& slot = the_default();
  std::lock_guard<std::mutex> lock(slot.mutex);
  return static_cast<bool>(slot.group);
}

ProcessGroup default_group() {
  auto& slot = the_default();
  std::lock_guard<std::mutex> lock(slot.mutex);
  DDP_CHECK(
      slot.group,
      "process group: expected a default group, got none. Call "
      "ddp::init_process_group() first, or pass a group.");
  return slot.group;
}

bool is_launched() { return read_environment(process_variable).rank.has_value(); }

ProcessGroup GroupArg::get() const {
  if (!given_) return default_group();
  DDP_CHECK(
      group_,
      "process group: expected a group this process is a member of, got an empty one. "
      "new_group() gives it to ranks that are not in the group: let those skip the call.");
  return group_;
}

int get_rank(const GroupArg& group) { return group.get()->getRank(); }

bool is_main(const GroupArg& group) { return get_rank(group) == 0; }

int get_world_size(const GroupArg& group) { return group.get()->getSize(); }

int get_local_rank() {
  return local_rank_of(
      read_environment(process_variable), is_initialized() ? default_group()->getSize() : 1);
}

}  // namespace ddp
