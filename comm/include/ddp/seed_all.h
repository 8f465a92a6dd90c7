#pragma once

#include <cstdint>

#include <ddp/export.h>
#include <ddp/process_group.h>

namespace ddp {

/// Seeds this rank's default generators, of the CPU and of all devices, by `seed` and the rank:
/// each rank then has its own dropout, noise and augmentation, and a repeated run has the same. The
/// two are mixed, so that seeds and ranks next to each other have nothing in common.
///
/// Call it after the models are made and wrapped, whose initial values are rank 0's anyway. What
/// all ranks have to draw alike (a split of a data set, a shuffle without a DistributedSampler, the
/// initial values of layers that are cut over ranks) is drawn before, after
/// torch::manual_seed(seed) with one seed, or from a generator of its own.
///
/// \param seed  the same on every rank.
/// \param group  whose ranks differ: in a mesh that of the replicas, `mesh.group("dp")`, so that
///         ranks that compute one sample together (tensor, context and pipeline parallel) draw
///         alike.
///
/// Collective: no. Source: as lightning.seed_everything(seed + rank), but mixed.
DDP_API void seed_all(uint64_t seed, const GroupArg& group = {});

}  // namespace ddp
