#pragma once

#include <map>
#include <string>

#include "backends/registry.h"

namespace ddp {

/// Which backend serves which device type: {"cpu": "gloo", "cuda": "nccl"}.
using BackendSpec = std::map<std::string, std::string>;

/// Reads ProcessGroupOptions' backend().
///
/// "gloo" serves CPU and CUDA tensors, "shm" CPU tensors, "nccl" CUDA tensors; "cpu:X,cuda:Y" (or
/// one of the two) chooses per device type; "" is "cpu:shm,cuda:nccl".
///
/// \param gpus_are_usable  whether each rank has a GPU of its own. If not, "" is "cpu:shm".
/// \throws c10::ValueError  on a malformed text, an unknown name or one that does not serve its
///         device, listing those there are.
BackendSpec parse_backend(const std::string& text, bool gpus_are_usable);

/// \throws c10::Error  when the spec has MPI, which LibTorch's binaries do not.
void check_built(const BackendSpec& spec);

/// The spec's backend that needs a GPU for each rank; nothing when there is none.
const backends::Description* backend_of_gpus(const BackendSpec& spec);

/// The inverse, for messages: "cpu:gloo,cuda:nccl".
std::string to_string(const BackendSpec& spec);

}  // namespace ddp
