#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/rank_text.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

// Checks of arguments before anything is sent. `call` is the function's name, for the message.

/// Checks for a defined, dense tensor on a device the group has a backend for.
void check_tensor(const char* call, const at::Tensor& tensor, c10d::ProcessGroup& group);

/// Checks for world-size such tensors, of the dtype and on the device of `like`.
void check_list(
    const char* call, const char* name, const std::vector<at::Tensor>& tensors,
    const at::Tensor& like, c10d::ProcessGroup& group);

/// Checks for an empty list, which all ranks but `root` must pass.
void check_no_list(
    const char* call, const char* name, const std::vector<at::Tensor>& tensors, int root,
    c10d::ProcessGroup& group);

/// Checks that `tensor` has the shape of `like`.
void check_shape(
    const char* call, const std::string& name, const at::Tensor& tensor, const at::Tensor& like,
    c10d::ProcessGroup& group);

/// Checks for a rank of the group, in the parameter `name`.
void check_rank(const char* call, const char* name, int rank, c10d::ProcessGroup& group);

/// Checks for another rank of the group, and a tag that backends accept.
void check_peer(const char* call, const char* name, int rank, int tag, c10d::ProcessGroup& group);

bool have_equal_shapes(const std::vector<at::Tensor>& tensors);

}  // namespace ddp
