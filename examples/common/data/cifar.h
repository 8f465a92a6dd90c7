#pragma once

#include <string>

#include "data_file.h"

namespace examples {

/// The two labels of a CIFAR-100 image.
enum class CifarLabels {
  kFine,    // of 100 classes
  kCoarse,  // of the 20 groups of classes
};

/// Reads CIFAR-10 in its binary version: `<folder>/data_batch_1.bin` to `data_batch_5.bin`, one
/// after the other, or `<folder>/test_batch.bin`. A file may have any number of images.
///
/// \param split  "train" or "test".
/// \return images [N, 3, 32, 32] (red, green, blue), labels in [0, 10); N >= 1.
/// \throws c10::ValueError  no such file, an empty one, one that does not end with a whole image,
///         or a label out of range; each names the file, the expected and the found value, and a
///         remedy.
LabeledImages read_cifar10(const std::string& folder, const std::string& split);

/// Reads CIFAR-100 in its binary version: `<folder>/train.bin` or `<folder>/test.bin`, otherwise as
/// `read_cifar10`.
///
/// \param labels  which to return, in [0, 100) or [0, 20). Both are checked.
LabeledImages read_cifar100(
    const std::string& folder, const std::string& split, CifarLabels labels = CifarLabels::kFine);

}  // namespace examples
