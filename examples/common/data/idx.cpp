#include "idx.h"

#include <array>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include <c10/util/Exception.h>

namespace examples {
namespace {

constexpr int64_t kClasses = 10;

std::string hex(uint32_t value) {
  std::array<char, 11> text{};
  std::snprintf(text.data(), text.size(), "0x%08x", value);
  return text.data();
}

std::string joined(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text;
}

// Three sizes of 32 bits can exceed 64 bits: the result is then the largest number, which no file
// reaches.
uint64_t product(const std::vector<int64_t>& sizes) {
  uint64_t result = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(result, static_cast<uint64_t>(size), &result)) {
      return std::numeric_limits<int64_t>::max();
    }
  }
  return result;
}

std::string missing_idx_remedy(const std::string& path) {
  return is_file(path + ".gz")
             ? "Unpack " + path + ".gz with gunzip."
             : "Pass a folder with MNIST's four files, as scripts/download_mnist.sh makes it.";
}

/// One open IDX file: a magic number, a 32-bit size for each dimension, then a byte an element.
class IdxFile {
 public:
  explicit IdxFile(const std::string& path)
      : file_(path, "an IDX file", missing_idx_remedy(path)) {}

  /// Checks the whole header, the file's length against it, and reads the elements.
  at::Tensor read(int64_t dimensions) {
    check_magic(dimensions);
    std::vector<int64_t> sizes;
    for (int64_t d = 0; d < dimensions; ++d) sizes.push_back(read_u32());
    TORCH_CHECK_VALUE(
        product(sizes) > 0, file_.path(), ": expected sizes of at least 1, found ", joined(sizes),
        ".");
    check_length(sizes);

    return file_.read_tensor(sizes);
  }

 private:
  void check_magic(int64_t dimensions) {
    const uint64_t header = 4 + 4 * static_cast<uint64_t>(dimensions);
    TORCH_CHECK_VALUE(
        file_.size() >= header, file_.path(), ": expected a header of ", header,
        " bytes, found a file of ", file_.size(), ". The file is cut short: fetch it again.");
    constexpr uint32_t kUnsignedBytes = 0x0800;
    const uint32_t expected = kUnsignedBytes + static_cast<uint32_t>(dimensions);
    const uint32_t found = read_u32();
    const bool gzip = found >> 16 == 0x1f8b;
    TORCH_CHECK_VALUE(
        found == expected, file_.path(), ": expected the magic number ", hex(expected),
        " (unsigned bytes, ", dimensions, dimensions == 1 ? " dimension" : " dimensions",
        "), found ", hex(found), gzip ? ". It is a gzip file: unpack it with gunzip." : ".");
  }

  void check_length(const std::vector<int64_t>& sizes) {
    const uint64_t header = 4 + 4 * sizes.size();
    const uint64_t expected = product(sizes);
    const uint64_t found = file_.size() - header;
    TORCH_CHECK_VALUE(
        found == expected, file_.path(), ": expected ", joined(sizes), " = ", expected,
        " bytes after the header, found ", found, ". The file is ",
        found < expected ? "cut short" : "too long", ": fetch it again.");
  }

  uint32_t read_u32() {
    std::array<unsigned char, 4> big_endian{};
    file_.read(big_endian.data(), big_endian.size());
    uint32_t value = 0;
    for (const unsigned char byte : big_endian) value = value << 8 | byte;
    return value;
  }

  DataFile file_;
};

}  // namespace

at::Tensor read_idx_images(const std::string& path) { return IdxFile(path).read(3); }

at::Tensor read_idx_labels(const std::string& path, int64_t classes) {
  const at::Tensor labels = IdxFile(path).read(1).to(at::kLong);
  check_labels(labels, classes, path);
  return labels;
}

LabeledImages read_mnist(const std::string& folder, const std::string& split) {
  const std::string images_path = folder + "/" + split + "-images-idx3-ubyte";
  const std::string labels_path = folder + "/" + split + "-labels-idx1-ubyte";
  LabeledImages data{read_idx_images(images_path), read_idx_labels(labels_path, kClasses)};
  TORCH_CHECK_VALUE(
      data.images.size(0) == data.labels.size(0), labels_path, ": expected ", data.images.size(0),
      " labels, as many as images in ", images_path, ", found ", data.labels.size(0), ".");
  return data;
}

}  // namespace examples
