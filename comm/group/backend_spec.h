#pragma once

#include <map>
#include <optional>
#include <string>

#include "backends/registry.h"

namespace ddp {

/// Maps a device type, in c10::Device's words, to the backend that serves it: {"cpu": "gloo",
/// "cuda": "nccl"}.
using BackendSpec = std::map<std::string, std::string>;

/// The device type of a key of a spec.
c10::DeviceType device_type_of(const std::string& device);

/// Parses ProcessGroupOptions' backend().
///
/// A name alone serves all devices of that backend: "gloo" CPU and CUDA tensors, "shm" CPU tensors,
/// "nccl" CUDA tensors; "cpu:X,cuda:Y" (or one half of it) chooses per device type; "" is
/// "cpu:shm,cuda:nccl".
///
/// \param gpus_are_usable  whether each rank has a GPU of its own. If not, "" is "cpu:shm".
/// \param unknown  gets the error about a name that is not known, if there is one: another rank may
///        have registered it. The result is then what is known. Null: it is thrown.
/// \throws c10::ValueError  on a malformed text, an unknown name or one that does not serve its
///         device, listing the names that do.
BackendSpec parse_backend(
    const std::string& text, bool gpus_are_usable, std::string* unknown = nullptr);

/// \throws c10::Error  if the spec has a backend that is not built in, such as MPI.
void check_built(const BackendSpec& spec);

/// The spec's backend that needs one device per rank, and the type of its devices.
struct DevicePicker {
  c10::DeviceType device;
  const backends::RegisteredBackend* backend;
};
std::optional<DevicePicker> device_picker(const BackendSpec& spec);

/// A text that is the same on all ranks that pass the same backends, whether or not this rank has
/// registered them.
std::string backend_claim(const std::string& text);

/// The inverse of parse_backend(), for messages: "cpu:gloo,cuda:nccl".
std::string to_string(const BackendSpec& spec);

}  // namespace ddp
