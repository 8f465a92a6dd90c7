// The tags of messages that one rank sends to another, and checks of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// The largest tag of a user's message. The library reserves larger ones.
constexpr int kMostTag = (1 << 30) - 1;

/// The tag of messages that an all-to-all is made of, to which their dtype is added.
constexpr int kAllToAllTag = 0x60000000;

constexpr bool is_tag(int tag) { return tag >= 0 && tag <= kMostTag; }

}  // namespace ddp

namespace ddp::backends {

/// Describes a message: sent before or with its elements, because transports compare nothing.
struct MessageHeader {
  int64_t numel = 0;
  int64_t dtype = 0;  // at::ScalarType
};

/// \throws c10::ValueError  unless it is one dense, contiguous tensor, and the tag one for users.
void check_message(const char* call, const std::vector<at::Tensor>& tensors, int tag);

/// An error with both descriptions; "" if the message fits `tensor`.
std::string problem_of_message(
    const MessageHeader& header, const at::Tensor& tensor, int source, int tag, int rank,
    int ranks);

}  // namespace ddp::backends
