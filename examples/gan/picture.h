#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace gan {

/// Lays images out in rows, each enlarged to at least 32 pixels, with a margin around it.
///
/// \param images   [N, 1, height, width] in [-1, 1], black to white; N >= 1.
/// \param columns  images in a row, >= 1.
/// \return [height, width] uint8 on the CPU.
at::Tensor picture_of(const at::Tensor& images, int64_t columns);

/// Writes a grey picture as a binary PGM file, which appears whole or not at all.
///
/// \param pixels  [height, width] uint8 on the CPU.
/// \throws c10::Error  the file cannot be written.
void write_pgm(const std::string& path, const at::Tensor& pixels);

}  // namespace gan
