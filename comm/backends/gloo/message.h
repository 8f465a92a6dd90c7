// The format in which a tensor is sent from one rank to another over Gloo.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp::backends {

/// The description of a message, sent before its elements. Gloo compares nothing: a message shorter
/// than the buffer fills a part of it, and a longer one makes Gloo throw on its own thread, which
/// ends the process.
///
/// Each message begins with a packet of limited size, which holds this and, for a short message,
/// the elements. The elements of a long message are a second message with the tag elements_tag(),
/// so that they cannot arrive in memory of another size. The receiver knows that tag in advance and
/// posts the receive before the elements come.
struct MessageHeader {
  int64_t numel = 0;
  int64_t dtype = 0;  // at::ScalarType
};

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

/// \throws c10::ValueError  unless it is one dense, contiguous tensor, and the tag one for users.
void check_message(const char* call, const std::vector<at::Tensor>& tensors, int tag);

/// An error with both descriptions; "" if the message fits `tensor`.
std::string problem_of_message(
    const at::Tensor& packet, const at::Tensor& tensor, int source, int tag, int rank, int ranks);

}  // namespace ddp::backends
