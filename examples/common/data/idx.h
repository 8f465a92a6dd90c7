#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "data_file.h"

namespace examples {

/// Reads an IDX file of images of any one size.
///
/// \return [N, height, width] uint8, N >= 1.
/// \throws c10::ValueError  no such file, another magic number, an empty dimension, too few or too
///         many bytes; each names the file, and the expected and the found value.
at::Tensor read_idx_images(const std::string& path);

/// Reads an IDX file of labels, each in [0, classes).
///
/// \return [N] int64, N >= 1.
/// \throws c10::ValueError  as `read_idx_images`, or a label out of range.
at::Tensor read_idx_labels(const std::string& path, int64_t classes);

/// Reads `<folder>/<split>-images-idx3-ubyte` and `<folder>/<split>-labels-idx1-ubyte`, MNIST's
/// names, and checks that they belong together.
///
/// \param split  "train" or "t10k".
/// \throws c10::ValueError  as the two above, or when the counts differ.
LabeledImages read_mnist(const std::string& folder, const std::string& split);

}  // namespace examples
