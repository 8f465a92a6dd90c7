#pragma once

#include <cstdint>
#include <string>

#include "../common/data/data_file.h"

namespace cifar10 {

/// Draws images of ten shapes and textures, equally many of each class: a disc, a square, a
/// triangle, a ring, a cross, a striped and a chequered patch, two bars, a half moon and a frame.
/// Position, size, angle, colours, background, clutter and noise are random, so that no single
/// pixel gives the class away: a linear classifier is hardly better than guessing.
///
/// \return images [count, 3, 32, 32], labels; the same for the same `seed` on every machine.
examples::LabeledImages draw_shapes(int64_t count, uint64_t seed);

/// Writes images as a file of CIFAR-10's binary version.
///
/// \throws c10::Error  when the file cannot be written; it names the file and the reason.
void write_cifar10(const examples::LabeledImages& data, const std::string& path);

}  // namespace cifar10
