#include <ddp/internal/call_log.h>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <c10/core/ScalarType.h>
#include <ddp/collective.h>
#include <ddp/internal/check.h>
#include <ddp/internal/rank_list.h>
#include <ddp/internal/tensor_memory.h>
#include <ddp/internal/text.h>

#include "calls/collective_call.h"

namespace ddp {
namespace {

constexpr size_t kBufferedBytes = size_t{256} << 10;
// A handle without a wait while so many calls began is forgotten.
constexpr uint64_t kKeptHandles = 4096;
// A wait that is shorter is not written.
constexpr int64_t kMomentUs = 20;

int64_t now_us() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

/// Without what separates fields and lines.
std::string one_field(std::string text) {
  for (auto& c : text) {
    if (c == '\t' || c == '\n' || c == '\r') c = ' ';
  }
  return text;
}

int64_t bytes_of_tensors(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    const auto& values = tensor.is_sparse() ? tensor._values() : tensor;
    bytes += static_cast<int64_t>(values.nbytes());
  }
  return bytes;
}

thread_local const CallLog::Place* current_place = nullptr;

std::string place_text() {
  if (current_place == nullptr) return "";
  auto place = one_field((*current_place)());
  if (begins_with(place, "starting ")) place.erase(0, std::strlen("starting "));
  return place;
}

}  // namespace

CallPlace::CallPlace(CallLog::Place place) : place_(place), outer_(current_place) {
  current_place = &place_;
}

CallPlace::~CallPlace() { current_place = outer_; }

std::atomic<CallLog*>& CallLog::active_pointer() {
  static std::atomic<CallLog*> pointer{nullptr};
  return pointer;
}

void CallLog::start(const std::string& folder, int rank, int world_size, int host_ranks) {
  if (active()) return;
  // Never destroyed: threads may start collectives while the process exits.
  active_pointer() =
      new CallLog(ddp::str(folder, "/rank_", rank, ".calls"), rank, world_size, host_ranks);
  count_tensor_memory();  // for good, so this library is never unloaded before its handler runs
#ifdef __GLIBC__
  ::on_exit([](int status, void*) { active()->close(status); }, nullptr);
#else
  std::atexit([] { active()->close(0); });
#endif
}

CallLog::CallLog(const std::string& path, int rank, int world_size, int host_ranks)
    : began_us_(now_us()),
      file_(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)),
      counting_(c10::intrusive_ptr<c10::TensorImpl>()) {
  DDP_CHECK(
      file_ >= 0, "DDP_CALLS_DIR: expected a folder that this process may write to, got ",
      std::strerror(errno), " for ", path, " on rank ", rank, " of ", world_size,
      ". Create it, or name another one.");
  write("ddp-calls\t1\n");
  write(ddp::str("rank\t", rank, '\t', world_size, '\t', host_ranks, '\n'));
}

CallLog::~CallLog() { close(0); }

int CallLog::add_group(
    const std::string& name, const std::string& axis, const std::vector<int>& ranks) {
  const std::lock_guard lock(mutex_);
  write(ddp::str(
      "group\t", groups_, '\t', one_field(name), '\t', one_field(axis), '\t', rank_list_text(ranks),
      '\n'));
  return groups_++;
}

uint64_t CallLog::add_call(int group, const Collective& call) {
  const auto& in = call.whole_in.defined() ? std::vector<at::Tensor>{call.whole_in} : call.in;
  return write_call(
      group, to_text(call.kind), static_cast<int>(call.first().scalar_type()), bytes_of_tensors(in),
      call.root);
}

uint64_t CallLog::add_call(
    int group, const char* kind, const std::vector<at::Tensor>& tensors, int peer, int tag) {
  return write_call(
      group, kind, tensors.empty() ? -1 : static_cast<int>(tensors[0].scalar_type()),
      bytes_of_tensors(tensors), peer, tag);
}

uint64_t CallLog::write_call(
    int group, const char* kind, int dtype, int64_t bytes, int peer, int tag) {
  std::string name = dtype < 0 ? "-" : c10::toString(static_cast<c10::ScalarType>(dtype));
  for (auto& c : name) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  const auto place = place_text();
  const std::lock_guard lock(mutex_);
  auto line = ddp::str(
      "call\t", ++calls_, '\t', time_us(), '\t', group, '\t', kind, '\t', name, '\t', bytes, '\t',
      peer, '\t', place);
  if (tag >= 0) line += ddp::str('\t', tag);
  write(line + '\n');
  return calls_;
}

void CallLog::set_handle(const void* handle, uint64_t call) {
  if (handle == nullptr) return;
  const std::lock_guard lock(mutex_);
  handles_[handle] = call;
  if (handles_.size() < 2 * kKeptHandles) return;
  for (auto at = handles_.begin(); at != handles_.end();) {
    at = at->second + kKeptHandles < calls_ ? handles_.erase(at) : std::next(at);
  }
}

uint64_t CallLog::take_handle(const void* handle) {
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(handle);
  if (found == handles_.end()) return 0;
  const auto call = found->second;
  handles_.erase(found);
  return call;
}

void CallLog::add_wait(uint64_t call) {
  if (call == 0) return;
  const std::lock_guard lock(mutex_);
  write(ddp::str("wait\t", time_us(), '\t', call, '\n'));
}

void CallLog::add_pause(int64_t begin_us) {
  const std::lock_guard lock(mutex_);
  const auto end_us = time_us();
  if (end_us - begin_us < kMomentUs) return;
  write(ddp::str("pause\t", begin_us, '\t', end_us, '\n'));
}

void CallLog::add_forward(const at::Tensor& first, Tensors all) {
  if (!first.defined() || first.is_inference()) return;
  const std::lock_guard lock(mutex_);
  if (const auto counting = counting_.lock()) {
    if (counting.get() != first.unsafeGetTensorImpl() || version_ == first._version()) return;
  }
  counting_ = c10::weak_intrusive_ptr<c10::TensorImpl>(first.getIntrusivePtr());
  version_ = first._version();
  write(ddp::str("step\t", time_us(), '\t', steps_++, '\n'));
  count_step_of_memory(all());
}

void CallLog::set_failure(const std::string& why) {
  const std::lock_guard lock(mutex_);
  failure_ = one_field(why);
}

int64_t CallLog::time_us() const { return now_us() - began_us_; }

void CallLog::write(const std::string& line) {
  buffer_ += line;
  if (buffer_.size() >= kBufferedBytes) flush();
}

void CallLog::flush() {
  // The list is the parent's in a process that it forked.
  if (owner_.is_this_one()) {
    for (size_t done = 0; done < buffer_.size();) {
      const auto count = ::write(file_, buffer_.data() + done, buffer_.size() - done);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) break;  // a full disk: the list has no end
      done += static_cast<size_t>(count);
    }
  }
  buffer_.clear();
}

void CallLog::close(int exit_status) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (file_ < 0) return;
    struct rusage usage {};
    ::getrusage(RUSAGE_SELF, &usage);
    write(tensor_memory_lines());
    write(ddp::str("process\t", int64_t{usage.ru_maxrss} * 1024, '\n'));
    const int status = exit_status & 0xff;  // as the parent gets it
    if (failure_.empty()) failure_ = status == 0 ? "ok" : ddp::str("exit status ", status);
    write(ddp::str("end\t", time_us(), '\t', failure_, '\n'));
    flush();
    ::close(std::exchange(file_, -1));
  } catch (const std::exception&) {
    // Out of memory: the list has no end.
  }
}

}  // namespace ddp
