// The format in which a tensor is sent from one rank to another over Gloo.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp::backends {

/// The description of a message, sent before its elements. Gloo compares nothing: a message shorter
/// than the buffer fills a part of it, and a longer one makes Gloo throw on its own thread, which
/// ends the process.
///
/// Each message begins with a packet of limited size, which holds this and, for a short message,
/// the elements. The elements of a long message are a second message, whose tag is in the packet,
/// so that they cannot arrive in another message's memory.
struct MessageHeader {
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
/// \param elements_tag  kInPacket if the elements are in the packet.
at::Tensor make_packet(const at::Tensor& tensor, int32_t elements_tag);

/// Allocates a buffer that is large enough for any packet.
at::Tensor empty_packet();

MessageHeader read_header(const at::Tensor& packet);
/// Copies the elements in `packet` to `tensor`, which has the same size.
void copy_elements(const at::Tensor& packet, const at::Tensor& tensor);

/// \throws c10::ValueError  unless it is one dense, contiguous tensor, and the tag one for users.
void check_message(const char* call, const std::vector<at::Tensor>& tensors, int tag);

/// \throws c10::Error  with both descriptions, if the message does not fit `tensor`.
void check_received(
    const MessageHeader& header, const at::Tensor& tensor, int source, int tag, int rank,
    int ranks);
bool describes(const MessageHeader& header, const at::Tensor& tensor);

}  // namespace ddp::backends
