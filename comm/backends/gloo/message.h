// The format in which a tensor is sent from one rank to another over Gloo.
#pragma once

#include <ATen/core/Tensor.h>

#include "backends/message_check.h"

namespace ddp::backends {

// Gloo compares nothing: a message shorter than the buffer fills a part of it, and a longer one
// makes Gloo throw on its own thread, which ends the process.
//
// So each message begins with a packet of limited size, which holds a MessageHeader and, for a
// short message, the elements. The elements of a long message are a second message with the tag
// elements_tag(), so that they cannot arrive in memory of another size. The receiver knows that tag
// in advance and posts the receive before the elements come.

/// Whether a tensor's elements fit into the packet. A copy of 64 KiB costs less than a second
/// message.
bool fits_in_packet(const at::Tensor& tensor);

/// The tag of a long message's elements. It differs for each dtype, size and tag of the message.
int elements_tag(const at::Tensor& tensor, int tag);

/// \param tensor  contiguous, on the CPU.
at::Tensor make_packet(const at::Tensor& tensor);

/// Allocates a buffer that is large enough for any packet.
at::Tensor empty_packet();

/// Copies the elements in `packet` to `tensor`, which has the same size.
void copy_elements(const at::Tensor& packet, const at::Tensor& tensor);

/// The header that the sender of `packet` wrote.
MessageHeader header_of(const at::Tensor& packet);

}  // namespace ddp::backends
