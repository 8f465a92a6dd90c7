#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

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

/// The tensor's elements, on the host and in one piece.
at::Tensor bytes_of(const at::Tensor& tensor);

/// A state with its tensors' elements as one text.
std::string packed_state(const c10::IValue& state);
c10::IValue unpacked_state(const std::string& text);

/// A copy that shares no memory with the state.
c10::IValue copied(const c10::IValue& state);

uint64_t hash_of(const c10::IValue& state);

}  // namespace ddp::elastic
