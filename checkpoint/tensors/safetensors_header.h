// The header of a file of safetensors: u64 little-endian, the number of bytes of the JSON after it,
// {"name": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"a": "b"}};
// then the elements, to which the offsets are relative.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tensors/tensor_file.h"

namespace ddp {

using Metadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  std::vector<NamedKind> tensors;  // in the header's order
  std::vector<uint64_t> begins;    // of each tensor, in bytes of the file
  Metadata metadata;
};

/// The bytes of the length before the JSON.
inline constexpr size_t kSafetensorsLengthBytes = sizeof(uint64_t);

/// Returns the size of a file's header in bytes, with the length before the JSON: at most 100 MB.
///
/// \param front  the file's bytes from the first on: 8 of them, or all where it has fewer.
/// \throws c10::Error  as read_safetensors_header().
uint64_t safetensors_header_bytes(
    std::string_view front, uint64_t file_bytes, const std::string& path);

/// Reads the header of a file, and checks all that the format asks for.
///
/// \param header  safetensors_header_bytes() of the file. \param path  for the texts of errors.
/// \throws c10::Error  naming the file, the tensor, the rule and the value.
SafetensorsHeader read_safetensors_header(
    std::string_view header, uint64_t file_bytes, const std::string& path);

/// Writes a header with its length. The tensors' elements follow each other, in this order.
///
/// \throws c10::ValueError  a dtype that the format lacks, or a name that cannot be one.
std::string make_safetensors_header(
    const std::vector<NamedKind>& tensors, const Metadata& metadata, const std::string& path);

/// Returns the file of each tensor that an index of several files names: {"metadata": {..},
/// "weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}, in its order.
///
/// \throws c10::Error  as read_safetensors_header().
std::vector<std::pair<std::string, std::string>> read_safetensors_index(
    std::string_view json, const std::string& path);

uint64_t bytes_of(const TensorKind& kind);

}  // namespace ddp
