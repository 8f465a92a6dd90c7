#include <ddp/internal/side_stream.h>

#include <map>
#include <mutex>
#include <tuple>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <ddp/internal/current_stream.h>

namespace ddp {
namespace {

c10::Stream side_stream(c10::Device device, SideStream which) {
  static std::mutex mutex;
  static auto* const streams =
      new std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, SideStream>, c10::Stream>;
  const std::lock_guard lock(mutex);
  const std::tuple key(device.type(), device.index(), which);
  auto known = streams->find(key);
  if (known == streams->end()) {
    const c10::impl::VirtualGuardImpl backend(device.type());
    known = streams->emplace(key, backend.getStreamFromGlobalPool(device)).first;
  }
  return known->second;
}

}  // namespace

c10::Stream side_stream_after_current(c10::Device device, SideStream which) {
  const auto stream = side_stream(device, which);
  c10::Event before(device.type());
  before.record(current_stream_of(device));
  before.block(stream);
  return stream;
}

}  // namespace ddp
