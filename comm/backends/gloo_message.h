// How a tensor goes from one rank to another over Gloo.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp::backends {

/// What a message says of itself before its elements. Gloo compares nothing: of a shorter message
/// than expected it fills a part, and a longer one makes it throw on a thread of its own, which
/// ends the process.
///
/// Each message begins with a packet of one size at most, which holds this and, of a short message,
/// the elements. The elements of a long one follow by themselves, under a tag that the packet
/// names, so that they never meet another message's memory.
struct MessageHead {
  static constexpr int32_t kInPacket = -1;

  int64_t numel = 0;
  int64_t bytes = 0;
  int32_t dtype = 0;  // at::ScalarType
  int32_t elements_tag = kInPacket;
};

/// Whether a tensor's elements fit into the packet. A copy of 64 KiB costs less than the round trip
/// of a second message.
bool fits_in_packet(const at::Tensor& tensor);

/// \param tensor  contiguous, on the CPU.
/// \param elements_tag  kInPacket where the elements fit.
at::Tensor make_packet(const at::Tensor& tensor, int32_t elements_tag);

/// Memory for any packet.
at::Tensor empty_packet();

MessageHead head_of(const at::Tensor& packet);
/// Copies the elements that lie in `packet` to `tensor`, which is as large.
void take_elements(const at::Tensor& packet, const at::Tensor& tensor);

/// \throws c10::ValueError  unless it is one dense, contiguous tensor, and the tag one of a user's.
void check_message(const char* call, const std::vector<at::Tensor>& tensors, int tag);

/// \throws c10::Error  with both descriptions, where the message is not what `tensor` is for.
void check_received(
    const MessageHead& head, const at::Tensor& tensor, int source, int tag, int rank, int ranks);
bool is_for(const MessageHead& head, const at::Tensor& tensor);

}  // namespace ddp::backends
