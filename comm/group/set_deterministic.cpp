#include <ddp/set_deterministic.h>

#include <ATen/Context.h>
#include <c10/util/env.h>

namespace ddp {

void set_deterministic(uint64_t seed, bool deterministic_algorithms) {
  auto& context = at::globalContext();
  context.setDeterministicAlgorithms(deterministic_algorithms, /*warn_only=*/false);
  context.setDeterministicCuDNN(deterministic_algorithms);
  if (deterministic_algorithms) {
    context.setBenchmarkCuDNN(false);
    c10::utils::set_env("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/false);
  }
  at::manual_seed(seed);
}

}  // namespace ddp
