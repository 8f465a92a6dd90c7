// A device that runs an operation only when it has to: missing waits between streams show on any
// machine. Include it in one file of a program.
#pragma once

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace ddp::testing::toy {

constexpr c10::DeviceIndex kDevices = 2;
constexpr c10::StreamId kPoolStream = 5;

inline c10::Stream stream(c10::StreamId id, c10::DeviceIndex device = 0) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(at::kPrivateUse1, device), id);
}

struct Copy {
  c10::StreamId stream;
  bool pinned;
  bool non_blocking;
};

/// Records the calls to the device. An asynchronous copy is done only when a stream waits for an
/// event that was recorded after it.
struct Device {
  std::mutex mutex;
  std::map<c10::StreamId, std::deque<std::function<void()>>> queued;
  std::map<c10::StreamId, size_t> done;
  std::vector<Copy> copies;
  std::vector<c10::StreamId> waits;                    // the streams that waited for an event
  std::set<std::pair<void*, c10::StreamId>> recorded;  // by record_stream
  std::set<const void*> pinned;
  int events = 0;

  static Device& get() {
    static auto* const device = new Device();
    return *device;
  }

  void forget() {
    const std::lock_guard<std::mutex> lock(mutex);
    queued.clear();
    copies.clear();
    waits.clear();
    recorded.clear();
  }
};

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local c10::StreamId current_stream[kDevices] = {};

struct Event {
  c10::StreamId stream;
  size_t position;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return at::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto before = getDevice();
    current_device = d.index();
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(at::kPrivateUse1, current_device); }
  void setDevice(c10::Device d) const override { current_device = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current_device = d.index(); }
  c10::Stream getStream(c10::Device d) const override {
    return stream(current_stream[d.index()], d.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return stream(kPoolStream, d.index());
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto before = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(
      void** event, const c10::Stream& s, const c10::DeviceIndex, c10::EventFlag) const override {
    auto& device = Device::get();
    const std::lock_guard<std::mutex> lock(device.mutex);
    if (!*event) {
      *event = new Event();
      ++device.events;
    }
    *static_cast<Event*>(*event) = {s.id(), device.done[s.id()] + device.queued[s.id()].size()};
  }
  void block(void* event, const c10::Stream& s) const override {
    auto& device = Device::get();
    const std::lock_guard<std::mutex> lock(device.mutex);
    device.waits.push_back(s.id());
    const auto& point = *static_cast<Event*>(event);
    auto& queue = device.queued[point.stream];
    for (auto& done = device.done[point.stream]; done < point.position; ++done) {
      queue.front()();
      queue.pop_front();
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    auto& device = Device::get();
    const std::lock_guard<std::mutex> lock(device.mutex);
    delete static_cast<Event*>(event);
    --device.events;
  }
};

/// Memory of the device, or pinned: initialized so that a float that was never written is a NaN.
struct Allocator final : c10::Allocator {
  explicit Allocator(bool pinned) : pinned_(pinned) {}
  c10::DataPtr allocate(size_t size) override {
    void* const data = std::malloc(size + 1);
    std::memset(data, 0xff, size + 1);
    if (pinned_) {
      auto& device = Device::get();
      const std::lock_guard<std::mutex> lock(device.mutex);
      device.pinned.insert(data);
    }
    const auto where =
        pinned_ ? c10::Device(at::kCPU) : c10::Device(at::kPrivateUse1, current_device);
    return {data, data, &std::free, where};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }

 private:
  bool pinned_;
};

inline Allocator& memory() {
  static auto* const allocator = new Allocator(false);
  return *allocator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  bool isPinnedPtr(const void* data) const override {
    auto& device = Device::get();
    const std::lock_guard<std::mutex> lock(device.mutex);
    return device.pinned.count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* const allocator = new Allocator(true);
    return allocator;
  }
};

inline at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::kFloat));
}

inline at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::kFloat), format);
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  TORCH_CHECK(from.strides() == to.strides() && from.is_non_overlapping_and_dense());
  auto& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  const auto s = current_stream[to.device().index()];
  device.copies.push_back({s, device.pinned.count(from.data_ptr()) > 0, non_blocking});
  const auto run = [from, to] { std::memcpy(to.data_ptr(), from.data_ptr(), from.nbytes()); };
  if (non_blocking) {
    device.queued[s].push_back(run);
  } else {
    run();
  }
  return to;
}

inline void record_stream(at::Tensor& t, c10::Stream s) {
  auto& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  device.recorded.emplace(t.data_ptr(), s.id());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("record_stream", &record_stream);
}

// NOLINTNEXTLINE: LibTorch wants it as a static object.
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

inline const bool is_registered = [] {
  c10::register_privateuse1_backend("toy");
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace ddp::testing::toy
