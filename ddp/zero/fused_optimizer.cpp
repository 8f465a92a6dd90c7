#include <ddp/fused_optimizer.h>

namespace ddp {

FusedOptimizer::~FusedOptimizer() = default;

void sync_step_counts(const torch::optim::Optimizer& optimizer) {
  if (const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer)) {
    fused->sync_step_counts();
  }
}

void reset_step_counts(torch::optim::Optimizer& optimizer) {
  if (auto* fused = dynamic_cast<FusedOptimizer*>(&optimizer)) fused->reset_step_counts();
}

}  // namespace ddp
