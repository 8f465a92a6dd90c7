#pragma once

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>

#include <ATen/core/Tensor.h>

namespace examples {

/// The images and labels of one split, in file order.
struct LabeledImages {
  at::Tensor images;  // uint8: grey [N, height, width], in colour [N, channels, height, width]
  at::Tensor labels;  // [N] int64, each in [0, number of classes)
};

/// Whether `path` exists and is not a folder.
bool is_file(const std::string& path);

/// A file of data, read from its front.
class DataFile {
 public:
  /// \param kind    the expected kind of file, for the message: "an IDX file".
  /// \param remedy  a sentence for the message, on what to do without the file.
  /// \throws c10::ValueError  no such file, a folder, or one that cannot be opened.
  DataFile(const std::string& path, const std::string& kind, const std::string& remedy);

  const std::string& path() const { return path_; }
  /// The size in bytes when it was opened.
  uint64_t size() const { return size_; }

  /// Reads the next `size` bytes.
  ///
  /// \throws c10::ValueError  the file ends before them.
  void read(void* bytes, size_t size);

  /// Reads the next bytes as a uint8 tensor of these sizes.
  ///
  /// \throws c10::ValueError  as `read`.
  at::Tensor read_tensor(at::IntArrayRef sizes);

 private:
  std::string path_;
  std::ifstream stream_;
  uint64_t size_ = 0;
};

/// Checks that each of `labels` ([N] int64) is in [0, classes).
///
/// \param path    the file of the labels, for the message.
/// \param kind    the file's word for a label, for the message.
/// \param remedy  what to do about a wrong one: nothing, or a space and a sentence.
/// \throws c10::ValueError  a label is out of range; gives the position of the first one.
void check_labels(
    const at::Tensor& labels, int64_t classes, const std::string& path,
    const std::string& kind = "labels", const std::string& remedy = "");

}  // namespace examples
