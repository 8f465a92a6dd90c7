#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ddp/internal/file_io.h>
#include "tensors/safetensors_header.h"
#include "tensors/tensor_file.h"

namespace ddp {

class SafetensorsFile : public TensorFile {
 public:
  /// \throws c10::Error  as read_safetensors_header().
  explicit SafetensorsFile(const std::string& path);

  const Metadata& metadata() const { return header_.metadata; }
  const std::vector<NamedKind>& tensors() const override { return header_.tensors; }
  at::Tensor read(size_t i, const TensorBox& box) override;

 private:
  const InputFile file_;
  const SafetensorsHeader header_;
};

/// The files that an index names.
class SafetensorsFiles : public TensorFile {
 public:
  /// \throws c10::Error  also where a file lacks a tensor that the index has in it.
  explicit SafetensorsFiles(const std::string& index);

  const std::vector<NamedKind>& tensors() const override { return tensors_; }
  at::Tensor read(size_t i, const TensorBox& box) override;

 private:
  struct Place {
    SafetensorsFile* file = nullptr;
    size_t i = 0;  // in the file
  };

  std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;
  std::vector<NamedKind> tensors_;
  std::vector<Place> places_;  // of each of them
};

}  // namespace ddp
