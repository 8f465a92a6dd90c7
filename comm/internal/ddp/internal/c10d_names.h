#pragma once

// Later LibTorch renames the collectives of one tensor per rank, and warns about the old names.
#include <ddp/collective_backend.h>  // has those of c10d::Backend
#include <torch/version.h>

// Methods of c10d::ProcessGroup.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
#define DDP_GROUP_ALL_GATHER_SINGLE all_gather_single
#define DDP_GROUP_REDUCE_SCATTER_SINGLE reduce_scatter_single
#define DDP_GROUP_ALL_TO_ALL_SINGLE all_to_all_single
#else
#define DDP_GROUP_ALL_GATHER_SINGLE _allgather_base
#define DDP_GROUP_REDUCE_SCATTER_SINGLE _reduce_scatter_base
#define DDP_GROUP_ALL_TO_ALL_SINGLE alltoall_base
#endif
