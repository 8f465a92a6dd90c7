#include "backends/gloo/message.h"

#include <cstring>

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <ddp/internal/check.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/text.h>

#include "backends/tags.h"

namespace ddp::backends {
namespace {

constexpr size_t kMostInPacket = size_t{64} << 10;

// The tags above the users': of elements, and of the packets of groups. Gloo::close_connection()
// uses the largest ones.
constexpr int kFirstOfElements = kMostTag + 1;
constexpr uint64_t kTagsOfElements = uint64_t{1} << 29;
constexpr int kFirstOfGroups = kFirstOfElements + static_cast<int>(kTagsOfElements);
constexpr uint64_t kTagsOfGroups = kTagsOfElements - 1024;

at::Tensor packet_of(size_t bytes_of_elements) {
  return at::empty({static_cast<int64_t>(sizeof(MessageHeader) + bytes_of_elements)}, at::kByte);
}

}  // namespace

bool fits_in_packet(const at::Tensor& tensor) { return tensor.nbytes() <= kMostInPacket; }

int packet_tag(uint64_t group, int tag) {
  if (group == 0) return tag;
  // Packets of two messages with one tag are told apart by their headers.
  const uint64_t fields[] = {group, static_cast<uint64_t>(tag)};
  return kFirstOfGroups + static_cast<int>(hash_of_bytes(fields, sizeof fields) % kTagsOfGroups);
}

int elements_tag(const at::Tensor& tensor, uint64_t group, int tag) {
  const uint64_t fields[] = {
      static_cast<uint64_t>(tag), static_cast<uint64_t>(tensor.scalar_type()),
      static_cast<uint64_t>(tensor.numel()), group};
  return kFirstOfElements +
         static_cast<int>(hash_of_bytes(fields, sizeof fields) % kTagsOfElements);
}

at::Tensor make_packet(const at::Tensor& tensor, uint64_t group, int tag) {
  const bool holds_elements = fits_in_packet(tensor);
  auto packet = packet_of(holds_elements ? tensor.nbytes() : 0);
  const MessageHeader header{
      tensor.numel(), static_cast<int64_t>(tensor.scalar_type()), group, tag};
  auto* bytes = packet.mutable_data_ptr<uint8_t>();
  std::memcpy(bytes, &header, sizeof header);
  if (holds_elements && tensor.nbytes() > 0) {
    std::memcpy(bytes + sizeof header, tensor.const_data_ptr(), tensor.nbytes());
  }
  return packet;
}

at::Tensor empty_packet() { return packet_of(kMostInPacket); }

void copy_elements(const at::Tensor& packet, const at::Tensor& tensor) {
  if (tensor.nbytes() == 0) return;
  const auto* elements =
      static_cast<const uint8_t*>(packet.const_data_ptr()) + sizeof(MessageHeader);
  std::memcpy(tensor.mutable_data_ptr(), elements, tensor.nbytes());
}

void check_message(const char* call, const std::vector<at::Tensor>& tensors, int tag) {
  DDP_CHECK_VALUE(
      tensors.size() == 1 && tensors[0].layout() == at::kStrided && tensors[0].is_contiguous(),
      call, ": expected one dense, contiguous tensor, got ", tensors.size(),
      " tensor(s), or one that is not. Call contiguous() first.");
  DDP_CHECK_VALUE(
      is_tag(tag), call, ": expected a tag of 0 to ", kMostTag, ", got ", tag,
      ". Give both sides the same one, such as 0.");
}

std::string problem_of_message(const at::Tensor& packet, const Receive& receive) {
  MessageHeader header;
  std::memcpy(&header, packet.const_data_ptr(), sizeof header);
  const auto place = ddp::str(" on rank ", receive.rank, " of ", receive.ranks);
  if (header.group != receive.group || header.tag != receive.tag) {
    return ddp::str(
        "recv: expected a message with tag ", receive.tag, " from rank ", receive.source,
        ", got one of another group, with tag ", header.tag, ",", place,
        ": their hashes are equal. Choose another tag.");
  }
  const auto dtype = static_cast<at::ScalarType>(header.dtype);
  const auto& tensor = receive.tensor;
  if (dtype == tensor.scalar_type() && header.numel == tensor.numel()) return "";
  return ddp::str(
      "recv: expected a message of ", tensor.numel(), " x ", tensor.scalar_type(), " from rank ",
      receive.source, " with tag ", receive.tag, ", got ", header.numel, " x ", dtype, place,
      ". Receive what was sent, in the order of sending: tensors of the same dtype and size.");
}

}  // namespace ddp::backends
