#include "launch/pretend/costs.h"

#include <map>

namespace ddp::launch {
namespace {

/// The bytes that pass through each link of a ring.
enum class Volume { None, Once, OtherParts, TwiceOtherParts, OtherRanks };

struct Ring {
  int sweeps;  // of n - 1 rounds
  Volume volume;
};

Ring ring_of(const std::string& kind) {
  static const std::map<std::string, Ring> kRings = {
      {"all_reduce", {2, Volume::TwiceOtherParts}},
      {"reduce_scatter", {1, Volume::OtherParts}},
      {"all_to_all", {1, Volume::OtherParts}},
      {"scatter", {1, Volume::OtherParts}},
      {"all_gather", {1, Volume::OtherRanks}},
      {"gather", {1, Volume::OtherRanks}},
      {"broadcast", {1, Volume::Once}},
      {"reduce", {1, Volume::Once}},
      {"barrier", {2, Volume::None}}};
  const auto ring = kRings.find(kind);
  return ring != kRings.end() ? ring->second : Ring{1, Volume::Once};
}

double bytes_through(Volume volume, double size, double bytes) {
  switch (volume) {
    case Volume::None:
      return 0;
    case Volume::Once:
      return bytes;
    case Volume::OtherParts:
      return bytes * (size - 1) / size;
    case Volume::TwiceOtherParts:
      return 2 * bytes * (size - 1) / size;
    case Volume::OtherRanks:
      return bytes * (size - 1);
  }
  return 0;
}

bool is_message(const std::string& kind) { return kind == "send" || kind == "recv"; }

}  // namespace

Way way_of(const Links& links, bool is_one_host) {
  return {links.latency, is_one_host ? links.host_rate : links.network_rate};
}

int64_t rounds_of(const std::string& kind, int64_t size) {
  return is_message(kind) ? 1 : ring_of(kind).sweeps * (size - 1);
}

double seconds_of(const std::string& kind, int64_t size, int64_t bytes, const Way& way) {
  if (size < 2) return 0;
  const auto own = static_cast<double>(bytes);
  const double through =
      is_message(kind) ? own : bytes_through(ring_of(kind).volume, static_cast<double>(size), own);
  return static_cast<double>(rounds_of(kind, size)) * way.latency + through / way.rate;
}

}  // namespace ddp::launch
