#pragma once

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "zero/mapped_file.h"

namespace ddp {

/// The state of an optimizer in a file: of each of its parameters the tensors side by side, in the
/// order of a step, so that a step reads and writes the file from its begin to its end.
class StateFile {
 public:
  /// The state of a parameter of the optimizer.
  struct Entry {
    const void* parameter;  // its TensorImpl
    int64_t numel;
    at::ScalarType type;
    std::vector<char> is_needed;  // by tensor of the state: whether the options need it
  };

  /// \param entries  in the order of a step.
  /// \throws c10::Error  as MappedFile::make().
  StateFile(const std::string& path, const std::vector<Entry>& entries);

  /// Moves a tensor of a parameter's state into the file, where it is not there. A tensor that the
  /// options did not need when this was made stays in memory.
  ///
  /// \param index  among the tensors of the state.
  void keep(const void* parameter, size_t index, at::Tensor& tensor);

  /// Begins to read the states from the first parameter to the last.
  void prefetch(const void* first, const void* last) const;
  /// Begins to write them, and waits for earlier ones, so that a bounded part of the file is in
  /// memory that the kernel cannot take yet.
  void write(const void* first, const void* last);

 private:
  struct Place {
    FileSpan span;
    std::vector<at::Tensor> tensors;  // by index; undefined where not needed
  };
  FileSpan span_of(const void* first, const void* last) const;

  std::shared_ptr<MappedFile> file_;  // null where no state is needed
  std::unordered_map<const void*, Place> places_;
  std::deque<FileSpan> writing_;
  size_t bytes_writing_ = 0;
  size_t bytes_moved_ = 0;  // into the file, since memory was given back last
};

}  // namespace ddp
