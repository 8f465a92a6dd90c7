#include <ddp/internal/side_stream.h>

#include <map>
#include <mutex>
#include <tuple>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <ddp/internal/current_stream.h>

#include "device/new_stream.h"

namespace ddp {
namespace {

c10::Stream made_stream(c10::Device device, SideStream which) {
  if (which == SideStream::Times) {
    try {
      return new_stream(device);
    } catch (const c10::Error&) {
      // A device of a program's own may have only a pool.
    }
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

}  // namespace

c10::Stream side_stream(c10::Device device, SideStream which) {
  static std::mutex mutex;
  // Never destroyed: a program may use streams while it exits.
  static auto* const streams =
      new std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, SideStream>, c10::Stream>;
  const std::lock_guard lock(mutex);
  const std::tuple key(device.type(), device.index(), which);
  const auto known = streams->find(key);
  if (known != streams->end()) return known->second;
  return streams->emplace(key, made_stream(device, which)).first->second;
}

c10::Stream side_stream_after_current(c10::Device device, SideStream which) {
  const auto stream = side_stream(device, which);
  c10::Event before(device.type());
  before.record(current_stream_of(device));
  before.block(stream);
  return stream;
}

}  // namespace ddp
