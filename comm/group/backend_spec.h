#pragma once

#include <map>
#include <string>

#include "backends/registry.h"

namespace ddp {

/// Maps a device type to the backend that serves it: {"cpu": "gloo", "cuda": "nccl"}.
using BackendSpec = std::map<std::string, std::string>;

/// Parses ProcessGroupOptions' backend().
///
/// "gloo" serves CPU and CUDA tensors, "shm" CPU tensors, "nccl" CUDA tensors; "cpu:X,cuda:Y" (or
/// one half of it) chooses per device type; "" is "cpu:shm,cuda:nccl".
///
/// \param gpus_are_usable  whether each rank has a GPU of its own. If not, "" is "cpu:shm".
/// \throws c10::ValueError  on a malformed text, an unknown name or one that does not serve its
///         device, listing the names that do.
BackendSpec parse_backend(const std::string& text, bool gpus_are_usable);

/// \throws c10::Error  if the spec has MPI, which LibTorch's binaries do not contain.
void check_built(const BackendSpec& spec);

/// The spec's backend that needs one GPU per rank; null if there is none.
const backends::BackendDescription* backend_of_gpus(const BackendSpec& spec);

/// The inverse of parse_backend(), for messages: "cpu:gloo,cuda:nccl".
std::string to_string(const BackendSpec& spec);

}  // namespace ddp
