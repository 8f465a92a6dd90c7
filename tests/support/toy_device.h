// A device of two GPUs' shape whose streams run nothing before somebody waits for it: missing waits
// between streams, and memory that is freed while another stream reads it, show as NaN on any
// machine. It takes any operation that LibTorch has for the CPU.
//
// A stream runs when another one waits for an event that was recorded after its work, when the host
// synchronizes with it, and one operation further with each query of an event. Memory is
// overwritten in the order of the stream that it was allocated on once it is freed, as the next
// owner would do, but not where record_stream() makes the allocator wait for another stream.
//
// What it registers stays in the process: link toy_device.cpp into a program of its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "support/ranks.h"

namespace ddp::testing::toy {

constexpr c10::DeviceIndex kDevices = 2;
constexpr c10::StreamId kPoolStream = 5;
constexpr c10::StreamId kNewStream = 50;  // of no pool

inline c10::Stream stream(c10::StreamId id, c10::DeviceIndex device = 0) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(at::kPrivateUse1, device), id);
}

struct Copy {
  c10::StreamId stream;
  bool pinned;
  bool non_blocking;
};

/// The streams of both GPUs, and records of the calls to them. Its functions lock `mutex`.
struct Device {
  using Key = std::pair<c10::DeviceIndex, c10::StreamId>;

  /// Work that a stream has not done yet, and the time at which it did each of the rest.
  struct Stream {
    std::deque<std::function<void()>> queued;
    std::vector<int64_t> done_at;
    size_t end() const { return done_at.size() + queued.size(); }
  };

  static Device& get();
  static Key key_of(const c10::Stream& s) { return {s.device_index(), s.id()}; }

  void push(const Key& stream, std::function<void()> run);
  /// Runs the first `position` pieces of work that the stream has ever had.
  void run_until(const Key& stream, size_t position);
  /// As a synchronization of the host with a stream.
  void synchronize(const Key& stream);
  /// Whether the stream has nothing to do.
  bool is_idle(const Key& stream);
  /// Ends all work, and forgets the records.
  void forget();

  std::recursive_mutex mutex;
  std::map<Key, Stream> streams;
  int64_t clock = 0;                                   // ticks once a piece of work
  std::map<c10::StreamId, int> launches;               // operations and copies, by stream
  std::vector<Copy> copies;                            // between the host and the device
  std::vector<c10::StreamId> waits;                    // the streams that waited for an event
  std::set<std::pair<void*, c10::StreamId>> recorded;  // by record_stream
  std::set<const void*> pinned;
  std::atomic<bool> has_pinned_memory{true};  // else its allocation throws
  int events = 0;                             // that exist
  int events_made = 0;                        // since forget(), as the next
  int pinned_made = 0;                        // pieces of pinned memory
  std::atomic<int> host_waits{0};             // synchronizations, and copies that block
  std::atomic<int> polls{0};                  // of the echo's collectives
  std::vector<bool> echo_busy;  // whether a collective of the echo began before the last had ended
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return at::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device d) const override;
  c10::Device getDevice() const override;
  void setDevice(c10::Device d) const override;
  void uncheckedSetDevice(c10::Device d) const noexcept override;
  c10::Stream getStream(c10::Device d) const override;
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(0, d.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return stream(kPoolStream, d.index());
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return stream(kNewStream, d.index());
  }
  c10::Stream exchangeStream(c10::Stream s) const override;
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(
      void** event, const c10::Stream& s, const c10::DeviceIndex, c10::EventFlag) const override;
  void block(void* event, const c10::Stream& s) const override;
  bool queryEvent(void* event) const override;
  void synchronizeEvent(void* event) const override;
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override;
  void synchronizeStream(const c10::Stream& s) const override;
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override;
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override;
};

/// The values, once the current stream of the tensor's device has done its work.
at::Tensor on_host(const at::Tensor& t);

/// A backend of `size` ranks of which all others have what this one has. Its collectives run on a
/// stream of its own, and a wait makes the current stream wait, as ProcessGroupNCCL's. It takes
/// tensors of the CPU, too, for the same numbers without streams. It has all-reduce, broadcast, and
/// all-gather, reduce-scatter and all-to-all of one tensor.
c10::intrusive_ptr<c10d::Backend> make_echo(int rank, int size);
/// Rank 0 of `size` over make_echo(), whose other ranks have the same numbers.
c10::intrusive_ptr<c10d::ProcessGroup> echo_group(int size = 2);
constexpr c10::StreamId kEchoStream = 100;
/// Ranks whose groups are over make_echo(), for tensors of the CPU and of the device.
RanksOptions over_echo();

}  // namespace ddp::testing::toy
