#include "support/toy_device.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace ddp::testing::toy {
namespace {

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {};

Device::Key current_key(c10::DeviceIndex device) { return {device, current_stream[device]}; }

using Lock = std::lock_guard<std::recursive_mutex>;

struct Event {
  Device::Key stream;
  size_t position = 0;
  int64_t recorded_at = 0;
};

/// Memory that was never written is a NaN, and so is memory that its next owner has.
void spoil(void* data, size_t size) { std::memset(data, 0xff, size); }

struct Block {
  void* data;
  size_t size;
  Device::Key stream;  // that it was allocated on
  bool has_readers;    // other streams, by record_stream: an allocator waits for them

  // Not to the heap, so that a use of it reads a NaN, and does nothing worse.
  static void free(void* context) {
    auto* const block = static_cast<Block*>(context);
    if (!block->has_readers) {
      Device::get().push(block->stream, [block] { spoil(block->data, block->size); });
    }
  }
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* const block =
        new Block{std::malloc(size + 1), size + 1, current_key(current_device), false};
    spoil(block->data, block->size);
    return {block->data, block, &Block::free, c10::Device(at::kPrivateUse1, current_device)};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto& device = Device::get();
    TORCH_CHECK(device.has_pinned_memory, "out of pinned memory");
    void* const data = std::malloc(size + 1);
    spoil(data, size + 1);
    const Lock lock(device.mutex);
    device.pinned.insert(data);
    ++device.pinned_made;
    return {data, data, &std::free, c10::Device(at::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

Memory& memory() {
  static auto* const allocator = new Memory();
  return *allocator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  // No operation takes numbers from it.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const auto generator = at::detail::createCPUGenerator();
    return generator;
  }
  bool isPinnedPtr(const void* data) const override {
    auto& device = Device::get();
    const Lock lock(device.mutex);
    return device.pinned.count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* const allocator = new PinnedMemory();
    return allocator;
  }
};

bool is_toy(const at::Tensor& t) { return t.defined() && t.device().type() == at::kPrivateUse1; }

/// The memory itself, without a reference to it: nothing but the program keeps it.
at::Tensor host_view(const at::Tensor& t) {
  if (!is_toy(t)) return t;
  return at::from_blob(
      t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
}
/// Zeros of the shape, from which an operation makes results of the right shapes.
at::Tensor shape_of(const at::Tensor& t) {
  if (!is_toy(t)) return t;
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU)).zero_();
}

/// `value` with each tensor of the device replaced.
template <typename Replace>
c10::IValue replaced(const c10::IValue& value, c10::DeviceType type, const Replace& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isDevice() && value.toDevice().type() == at::kPrivateUse1) return c10::Device(type);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(replace(t));
    return list;
  }
  return value;
}

c10::DeviceIndex device_of(const std::vector<c10::IValue>& arguments) {
  for (const auto& a : arguments) {
    if (a.isTensor() && is_toy(a.toTensor())) return a.toTensor().device().index();
    if (!a.isTensorList()) continue;
    for (const at::Tensor& t : a.toTensorVector()) {
      if (is_toy(t)) return t.device().index();
    }
  }
  return current_device;
}

torch::jit::Stack replaced_all(
    const std::vector<c10::IValue>& arguments, c10::DeviceType type,
    const std::function<at::Tensor(const at::Tensor&)>& replace) {
  torch::jit::Stack stack;
  for (const auto& a : arguments) stack.push_back(replaced(a, type, replace));
  return stack;
}

bool is_empty_output(const c10::Argument& argument, const c10::IValue& value) {
  return argument.alias_info() != nullptr && argument.kwarg_only() && value.isTensor() &&
         is_toy(value.toTensor()) && value.toTensor().numel() == 0;
}

/// As an operation does with an `out` that has no elements yet.
void resize_outputs(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  const auto& schema = op.schema();
  std::optional<torch::jit::Stack> shapes;
  size_t output = 0;
  for (size_t a = 0; a < arguments.size(); ++a) {
    if (!is_empty_output(schema.arguments()[a], arguments[a])) continue;
    if (!shapes) {
      shapes = replaced_all(arguments, at::kCPU, shape_of);
      op.callBoxed(*shapes);
    }
    auto t = arguments[a].toTensor();
    const auto& shape = (*shapes)[output++].toTensor();
    const auto fresh = at::empty_strided(shape.sizes(), shape.strides(), t.options());
    at::native::set_storage_cpu_(t, fresh.storage(), 0, shape.sizes(), shape.strides());
  }
}

/// Any operation: queued on the current stream, and run there with the CPU's.
void queue_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowAutograd below;
  const auto& schema = op.schema();
  const auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  const std::vector<c10::IValue> given(arguments.begin(), arguments.end());
  resize_outputs(op, given);
  auto on_cpu = std::make_shared<torch::jit::Stack>(replaced_all(given, at::kCPU, host_view));
  const auto index = device_of(given);
  std::vector<c10::IValue> results;
  std::vector<std::optional<at::Tensor>> fresh;  // views of results that the operation allocates
  std::optional<torch::jit::Stack> shapes;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias != nullptr) {
      for (size_t a = 0; a < given.size(); ++a) {
        const auto* other = schema.arguments()[a].alias_info();
        if (other == nullptr || other->beforeSets() != alias->beforeSets()) continue;
        results.push_back(given[a]);
        break;
      }
      fresh.emplace_back();
      continue;
    }
    if (!shapes) {
      shapes = replaced_all(given, at::kCPU, shape_of);
      op.callBoxed(*shapes);
    }
    const auto& shape = (*shapes)[i].toTensor();
    const c10::OptionalDeviceGuard guard(c10::Device(at::kPrivateUse1, index));
    const auto result = at::empty_strided(
        shape.sizes(), shape.strides(),
        shape.options().device(c10::Device(at::kPrivateUse1, index)));
    fresh.emplace_back(host_view(result));
    results.emplace_back(result);
  }
  auto& device = Device::get();
  const Lock lock(device.mutex);
  device.push(current_key(index), [op, on_cpu, fresh] {
    const at::NoGradGuard inner;
    const at::AutoDispatchBelowAutograd below_too;
    op.callBoxed(*on_cpu);
    for (size_t i = 0; i < fresh.size(); ++i) {
      if (fresh[i]) fresh[i]->copy_((*on_cpu)[i].toTensor());
    }
  });
  for (auto& result : results) stack->push_back(std::move(result));
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<c10::Device> where, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(where);
  return at::detail::empty_strided_generic(
      size, stride, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::kFloat));
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> where, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(where);
  return at::detail::empty_generic(
      size, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::kFloat), format);
}

// The host's memory stays until the copy is done, as that of the caching allocators does.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto& device = Device::get();
  const Lock lock(device.mutex);
  // Between GPUs on that of the source, after what the other's has to do.
  const auto stream = current_key(is_toy(from) ? from.device().index() : to.device().index());
  if (is_toy(from) && is_toy(to) && from.device() != to.device()) {
    const auto other = current_key(to.device().index());
    device.run_until(other, device.streams[other].end());
  }
  const bool between = is_toy(from) != is_toy(to);
  if (between) {
    const auto& host = is_toy(from) ? to : from;
    device.copies.push_back(
        {stream.second, device.pinned.count(host.storage().data()) > 0, non_blocking});
  }
  device.push(stream, [source = host_view(from), target = host_view(to)] {
    const at::NoGradGuard no_grad;
    at::Tensor(target).copy_(source);
  });
  if (is_toy(from) && is_toy(to) && from.device() != to.device()) {
    device.run_until(stream, device.streams[stream].end());  // both GPUs' streams wait
  }
  if (between && !non_blocking) device.synchronize(stream);
  return to;
}

c10::Scalar item(const at::Tensor& t) { return on_host(t).item(); }

void record_stream(at::Tensor& t, c10::Stream s) {
  auto& device = Device::get();
  const Lock lock(device.mutex);
  device.recorded.emplace(t.data_ptr(), s.id());
  Guard().recordDataPtrOnStream(t.storage().data_ptr(), s);
}

// A parameter's data may move between the host and the device, as between a CPU and a GPU.
bool may_take_data(const at::Tensor& /*own*/, const at::Tensor& /*other*/) { return true; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&queue_operation>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view.dtype", &at::native::view_dtype);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &may_take_data);
}

// NOLINTNEXTLINE: LibTorch wants it as a static object.
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool is_registered = [] {
  c10::register_privateuse1_backend("toy");
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

Device& Device::get() {
  static auto* const device = new Device();
  return *device;
}

void Device::push(const Key& stream, std::function<void()> run) {
  const Lock lock(mutex);
  streams[stream].queued.push_back(std::move(run));
}

void Device::run_until(const Key& key, size_t position) {
  const Lock lock(mutex);
  auto& stream = streams[key];
  while (stream.done_at.size() < position) {
    const auto run = std::move(stream.queued.front());
    stream.queued.pop_front();
    stream.done_at.push_back(++clock);
    run();
  }
}

void Device::synchronize(const Key& stream) {
  const Lock lock(mutex);
  ++host_waits;
  run_until(stream, streams[stream].end());
}

bool Device::is_idle(const Key& stream) {
  const Lock lock(mutex);
  return streams[stream].queued.empty();
}

void Device::forget() {
  const Lock lock(mutex);
  for (auto& [key, stream] : streams) run_until(key, stream.end());
  copies.clear();
  waits.clear();
  recorded.clear();
  echo_busy.clear();
  host_waits = 0;
  polls = 0;
  events_made = 0;
  pinned_made = 0;
}

c10::Device Guard::exchangeDevice(c10::Device d) const {
  const auto before = getDevice();
  current_device = d.index();
  return before;
}
c10::Device Guard::getDevice() const { return c10::Device(at::kPrivateUse1, current_device); }
void Guard::setDevice(c10::Device d) const { current_device = d.index(); }
void Guard::uncheckedSetDevice(c10::Device d) const noexcept { current_device = d.index(); }
c10::Stream Guard::getStream(c10::Device d) const {
  const auto index = d.has_index() ? d.index() : current_device;
  return stream(current_stream[index], index);
}
c10::Stream Guard::exchangeStream(c10::Stream s) const {
  const auto before = getStream(s.device());
  current_stream[s.device_index()] = s.id();
  return before;
}

void Guard::record(
    void** event, const c10::Stream& s, const c10::DeviceIndex, c10::EventFlag) const {
  auto& device = Device::get();
  const Lock lock(device.mutex);
  if (!*event) {
    *event = new Event();
    ++device.events;
    ++device.events_made;
  }
  const auto key = Device::key_of(s);
  *static_cast<Event*>(*event) = {key, device.streams[key].end(), device.clock};
}

void Guard::block(void* event, const c10::Stream& s) const {
  auto& device = Device::get();
  const Lock lock(device.mutex);
  device.waits.push_back(s.id());
  const auto& point = *static_cast<Event*>(event);
  if (point.stream != Device::key_of(s)) device.run_until(point.stream, point.position);
}

void Guard::synchronizeEvent(void* event) const {
  auto& device = Device::get();
  const Lock lock(device.mutex);
  ++device.host_waits;
  const auto& point = *static_cast<Event*>(event);
  device.run_until(point.stream, point.position);
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const {
  auto& device = Device::get();
  const Lock lock(device.mutex);
  const auto key = Device::key_of(s);
  if (data.get_deleter() != &Block::free) return;
  auto* const block = static_cast<Block*>(data.get_context());
  block->has_readers = block->has_readers || block->stream != key;
}

bool Guard::queryEvent(void* event) const {
  auto& device = Device::get();
  const Lock lock(device.mutex);
  const auto& point = *static_cast<Event*>(event);
  const auto done = device.streams[point.stream].done_at.size();
  if (done >= point.position) return true;
  device.run_until(point.stream, done + 1);
  return false;
}

double Guard::elapsedTime(void* from, void* to, const c10::DeviceIndex) const {
  auto& device = Device::get();
  const Lock lock(device.mutex);
  const auto time_of = [&](void* event) {
    const auto& point = *static_cast<Event*>(event);
    const auto& done_at = device.streams[point.stream].done_at;
    TORCH_CHECK(done_at.size() >= point.position, "the event has not come yet");
    const auto last = point.position == 0 ? 0 : done_at[point.position - 1];
    return std::max(last, point.recorded_at);
  };
  return static_cast<double>(time_of(to) - time_of(from));
}

void Guard::synchronizeStream(const c10::Stream& s) const {
  Device::get().synchronize(Device::key_of(s));
}

void Guard::destroyEvent(void* event, const c10::DeviceIndex) const noexcept {
  auto& device = Device::get();
  const Lock lock(device.mutex);
  delete static_cast<Event*>(event);
  --device.events;
}

at::Tensor on_host(const at::Tensor& t) {
  if (!is_toy(t)) return t.detach().clone();
  Device::get().synchronize(current_key(t.device().index()));
  return host_view(t.detach()).clone();
}

}  // namespace ddp::testing::toy
