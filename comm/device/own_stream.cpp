#include <map>
#include <mutex>
#include <string>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <ddp/internal/current_stream.h>

#include "device/new_stream.h"

namespace ddp {
namespace {

// A device of a program's own may have only a pool.
c10::Stream new_or_pooled_stream(c10::Device device) {
  try {
    return new_stream(device);
  } catch (const c10::Error&) {
    return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  }
}

}  // namespace

c10::Stream own_stream_of(c10::Device device) {
  static std::mutex mutex;
  // Never destroyed: a program may use streams while it exits.
  static auto* const streams = new std::map<std::string, c10::Stream>;  // by device
  const std::lock_guard lock(mutex);
  const auto found = streams->find(device.str());
  if (found != streams->end()) return found->second;
  return streams->emplace(device.str(), new_or_pooled_stream(device)).first->second;
}

}  // namespace ddp
