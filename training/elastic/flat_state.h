#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <ddp/internal/tensors_on_host.h>

namespace ddp::elastic {

/// A state as a text, and its tensors beside it.
struct FlatState {
  /// Structure, numbers, strings, and each tensor's dtype and sizes. Equal where the states are,
  /// apart from the tensors' elements.
  std::string text;
  std::vector<at::Tensor> tensors;
};

/// \param state  of tensors, numbers, strings, None, and lists, tuples and dictionaries of these.
/// \throws c10::ValueError  for anything else.
FlatState flatten(const c10::IValue& state);

/// \param text  of flatten().
/// \return  the state with new tensors on the host, whose elements are not set.
c10::IValue unflatten(const std::string& text, std::vector<at::Tensor>& tensors);

/// The tensor's elements in one piece, where it lies.
at::Tensor bytes_of(const at::Tensor& tensor);

/// A state with its tensors' elements as one text.
///
/// Blocks: the host, for tensors of devices once for each 256 MiB. So does hash_of().
std::string packed_state(const c10::IValue& state);
c10::IValue unpacked_state(const std::string& text);

/// A copy that shares no memory with the state. Tensors stay on their devices.
c10::IValue copied(const c10::IValue& state);
/// A copy on the host, which is whole after copies.wait().
c10::IValue copied_to_host(const c10::IValue& state, TensorsOnHost& copies);
/// The state with the tensors of the host, but for those of no dimension without `with_scalars`,
/// copied to a device.
///
/// Blocks: the host, once for each 64 MiB.
c10::IValue copied_to_device(const c10::IValue& state, c10::Device device, bool with_scalars);

uint64_t hash_of(const c10::IValue& state);

}  // namespace ddp::elastic
