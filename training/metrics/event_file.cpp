#include "metrics/event_file.h"

#include <cstring>

#include <ddp/internal/crc32c.h>

namespace ddp {
namespace {

template <typename Number>
std::string little_endian(Number number) {
  std::string bytes;
  for (size_t i = 0; i < sizeof number; ++i) bytes += static_cast<char>((number >> (8 * i)) & 0xFF);
  return bytes;
}

std::string masked_crc(const std::string& bytes) {
  constexpr uint32_t kDelta = 0xA282EAD8;
  const uint32_t crc = crc32c(0, bytes.data(), bytes.size());
  return little_endian(((crc >> 15U) | (crc << 17U)) + kDelta);
}

/// A message of protocol buffers, field by field.
class ProtoMessage {
 public:
  ProtoMessage& add_int64(uint32_t field, int64_t value) {
    add_key(field, 0);
    add_varint(static_cast<uint64_t>(value));
    return *this;
  }
  ProtoMessage& add_double(uint32_t field, double value) {
    return add_bits<uint64_t>(field, 1, value);
  }
  ProtoMessage& add_bytes(uint32_t field, const std::string& value) {
    add_key(field, 2);
    add_varint(value.size());
    bytes_ += value;
    return *this;
  }
  ProtoMessage& add_float(uint32_t field, float value) {
    return add_bits<uint32_t>(field, 5, value);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  template <typename Bits, typename Value>
  ProtoMessage& add_bits(uint32_t field, uint32_t wire_type, Value value) {
    static_assert(sizeof(Bits) == sizeof(Value));
    Bits bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    add_key(field, wire_type);
    bytes_ += little_endian(bits);
    return *this;
  }
  void add_key(uint32_t field, uint32_t wire_type) { add_varint((field << 3U) | wire_type); }
  void add_varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7U) bytes_ += static_cast<char>((value & 0x7F) | 0x80);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

// The numbers of fields.
constexpr uint32_t kWallTimeField = 1, kStepField = 2, kFileVersionField = 3,
                   kSummaryField = 5;                     // of Event
constexpr uint32_t kValueField = 1;                       // of Summary
constexpr uint32_t kTagField = 1, kSimpleValueField = 2;  // of Summary.Value

}  // namespace

std::string event_record(const std::string& payload) {
  const auto length = little_endian(uint64_t{payload.size()});
  return length + masked_crc(length) + payload + masked_crc(payload);
}

std::string first_event(double time) {
  return event_record(ProtoMessage()
                          .add_double(kWallTimeField, time)
                          .add_bytes(kFileVersionField, "brain.Event:2")
                          .bytes());
}

std::string scalar_event(const MetricPoint& point) {
  const auto value = ProtoMessage()
                         .add_bytes(kTagField, point.name)
                         .add_float(kSimpleValueField, static_cast<float>(point.value));
  const auto summary = ProtoMessage().add_bytes(kValueField, value.bytes());
  return event_record(ProtoMessage()
                          .add_double(kWallTimeField, point.time)
                          .add_int64(kStepField, point.step)
                          .add_bytes(kSummaryField, summary.bytes())
                          .bytes());
}

}  // namespace ddp
