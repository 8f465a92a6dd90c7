#pragma once

#include <ATen/core/Tensor.h>

namespace gan {

/// Measures how far apart two sets of images are: the Frechet distance of normal distributions with
/// their means and covariances of pixels. It grows where images look different, and where one
/// set has less variety.
///
/// \param a, b  [N, ...] and [M, ...] images with equally many pixels; N, M >= 2.
/// \throws c10::ValueError  fewer than 2 images.
/// Cost: O(pixels^3).
/// Source: Heusel et al., arXiv:1706.08500, who compare features of a large network, not pixels.
double frechet_distance(const at::Tensor& a, const at::Tensor& b);

}  // namespace gan
