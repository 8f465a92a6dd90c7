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
  int64_t dtype = 0;   // at::ScalarType
  uint64_t group = 0;  // MessageGroup::key; 0: the group that Gloo connects
  int64_t tag = 0;
};

/// Whether a tensor's elements fit into the packet. A copy of 64 KiB costs less than a second
/// message.
bool fits_in_packet(const at::Tensor& tensor);

/// The tag of a packet.
///
/// \param group  as in the header.
/// \param tag  the user's.
int packet_tag(uint64_t group, int tag);

/// The tag of a long message's elements. It differs for each dtype, size, tag and group of the
/// message.
int elements_tag(const at::Tensor& tensor, uint64_t group, int tag);

/// \param tensor  contiguous, on the CPU.
at::Tensor make_packet(const at::Tensor& tensor, uint64_t group, int tag);

/// Allocates a buffer that is large enough for any packet.
at::Tensor empty_packet();

/// Copies the elements in `packet` to `tensor`, which has the same size.
void copy_elements(const at::Tensor& packet, const at::Tensor& tensor);

/// \throws c10::ValueError  unless it is one dense, contiguous tensor, and the tag one for users.
void check_message(const char* call, const std::vector<at::Tensor>& tensors, int tag);

/// A receive, and who waits in it for whose message.
struct Receive {
  at::Tensor tensor;
  int source = 0;
  uint64_t group = 0;
  int tag = 0;
  int rank = 0;
  int ranks = 1;  // of the group
};

/// An error with both descriptions; "" if the message fits.
std::string problem_of_message(const at::Tensor& packet, const Receive& receive);

}  // namespace ddp::backends
