#include "sharded/copies/side_streams.h"

#include <map>
#include <mutex>
#include <utility>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <ddp/internal/current_stream.h>

namespace ddp {
namespace {

c10::Stream side_stream(c10::Device device, SideStream which) {
  static std::mutex mutex;
  static auto* const streams = new std::map<std::pair<c10::DeviceIndex, SideStream>, c10::Stream>;
  const std::lock_guard lock(mutex);
  const std::pair key(device.index(), which);
  auto known = streams->find(key);
  if (known == streams->end()) {
    const c10::impl::VirtualGuardImpl backend(device.type());
    known = streams->emplace(key, backend.getStreamFromGlobalPool(device)).first;
  }
  return known->second;
}

c10::Stream after_current(c10::Device device, const c10::Stream& stream) {
  c10::Event before(device.type());
  before.record(current_stream_of(device));
  before.block(stream);
  return stream;
}

}  // namespace

SideStreamGuard::SideStreamGuard(c10::Device device, SideStream stream)
    : guard_(after_current(device, side_stream(device, stream))) {}

}  // namespace ddp
