#pragma once

#include <cstdint>

#include "plan/layout.h"
#include "plan/model.h"

namespace ddp::plan {

/// Bytes of the rank of a layout that needs most.
struct Memory {
  double state = 0;        // parameters, gradients and AdamW's two numbers
  double whole = 0;        // what fsdp gathers, and gradients before they are cut
  double activations = 0;  // of the micro-batches under way, and the logits

  double total() const { return state + whole + activations; }
};

/// \param batch  samples of a step, of all replicas.
Memory memory_of(const Model&, const Layout&, int64_t batch);

}  // namespace ddp::plan
