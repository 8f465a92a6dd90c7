#pragma once

#include <cstdint>

#include <ddp/export.h>

namespace ddp {

/// Seeds this process's default generators, of the CPU and of all devices, by `seed`, and makes
/// LibTorch choose deterministic algorithms, so that a repeated run has the same bits;
/// docs/reproducibility.md has the conditions.
///
/// Call it first in main(), with one seed on all ranks: what the ranks draw before they wrap their
/// models is then the same everywhere. `seed_all()` gives each rank numbers of its own afterwards.
///
/// \param seed  for torch::manual_seed().
/// \param deterministic_algorithms  An operation without a deterministic algorithm throws, cuDNN
///        takes deterministic algorithms and does not try others out, and cuBLAS has a fixed
///        workspace: CUBLAS_WORKSPACE_CONFIG becomes ":4096:8" where it is not set, which cuBLAS
///        reads once. LibTorch also fills memory that `torch::empty()` gives, which costs time.
///        false: turns the first two off again.
///
/// Collective: no. Source: torch.manual_seed, torch.use_deterministic_algorithms,
/// torch.backends.cudnn.deterministic and .benchmark.
DDP_API void set_deterministic(uint64_t seed, bool deterministic_algorithms = true);

}  // namespace ddp
