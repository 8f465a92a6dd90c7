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

at::Tensor packet_of(size_t bytes_of_elements) {
  return at::empty({static_cast<int64_t>(sizeof(MessageHeader) + bytes_of_elements)}, at::kByte);
}

}  // namespace

bool fits_in_packet(const at::Tensor& tensor) { return tensor.nbytes() <= kMostInPacket; }

int elements_tag(const at::Tensor& tensor, int tag) {
  constexpr uint64_t kMask = 0x1fffffff;  // close_connection() uses the larger ones
  const uint64_t fields[] = {
      static_cast<uint64_t>(tag), static_cast<uint64_t>(tensor.scalar_type()),
      static_cast<uint64_t>(tensor.numel())};
  return kMostTag + 1 + static_cast<int>(hash_of_bytes(fields, sizeof fields) & kMask);
}

at::Tensor make_packet(const at::Tensor& tensor) {
  const bool holds_elements = fits_in_packet(tensor);
  auto packet = packet_of(holds_elements ? tensor.nbytes() : 0);
  const MessageHeader header{tensor.numel(), static_cast<int64_t>(tensor.scalar_type())};
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

std::string problem_of_message(
    const at::Tensor& packet, const at::Tensor& tensor, int source, int tag, int rank, int ranks) {
  MessageHeader header;
  std::memcpy(&header, packet.const_data_ptr(), sizeof header);
  const auto dtype = static_cast<at::ScalarType>(header.dtype);
  if (dtype == tensor.scalar_type() && header.numel == tensor.numel()) return "";
  return ddp::str(
      "recv: expected a message of ", tensor.numel(), " x ", tensor.scalar_type(), " from rank ",
      source, " with tag ", tag, ", got ", header.numel, " x ", dtype, " on rank ", rank, " of ",
      ranks,
      ". Receive what was sent, in the order of sending: tensors of the same dtype and size.");
}

}  // namespace ddp::backends
