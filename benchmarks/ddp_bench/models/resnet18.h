#pragma once

#include <memory>

#include "models.h"

namespace ddp_bench {

/// ResNet-18 for [N, 3, 32, 32] images and 10 classes: a 3x3 stem without pooling, then the eight
/// usual blocks. 11.2 million parameters, 45 MB.
///
/// Source: He et al., "Deep Residual Learning", 2015, with the stem of its section 4.2.
std::shared_ptr<Net> make_resnet18();

}  // namespace ddp_bench
