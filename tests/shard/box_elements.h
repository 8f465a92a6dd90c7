#pragma once

#include <cstdint>
#include <vector>

#include <ddp/parameter_layout.h>

namespace ddp::testing {

/// The flat indices, in a contiguous tensor of shape `whole`, of the elements of `box`, along its
/// last dimension first.
inline std::vector<int64_t> elements_of(const TensorBox& box, const std::vector<int64_t>& whole) {
  std::vector<int64_t> elements{0};
  for (size_t d = 0; d < whole.size(); ++d) {
    std::vector<int64_t> longer;
    for (const auto element : elements) {
      for (int64_t i = 0; i < box.size[d]; ++i) {
        longer.push_back(element * whole[d] + box.offset[d] + i);
      }
    }
    elements = std::move(longer);
  }
  return elements;
}

}  // namespace ddp::testing
