#include <ddp/internal/copy_stream.h>

#include <map>
#include <mutex>
#include <tuple>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <ddp/internal/current_stream.h>

namespace ddp {
namespace {

c10::Stream copy_stream(c10::Device device, CopyWay way) {
  static std::mutex mutex;
  static auto* const streams =
      new std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, CopyWay>, c10::Stream>;
  const std::lock_guard lock(mutex);
  const std::tuple key(device.type(), device.index(), way);
  auto known = streams->find(key);
  if (known == streams->end()) {
    const c10::impl::VirtualGuardImpl backend(device.type());
    known = streams->emplace(key, backend.getStreamFromGlobalPool(device)).first;
  }
  return known->second;
}

}  // namespace

c10::Stream copy_stream_after_current(c10::Device device, CopyWay way) {
  const auto stream = copy_stream(device, way);
  c10::Event before(device.type());
  before.record(current_stream_of(device));
  before.block(stream);
  return stream;
}

}  // namespace ddp
