#pragma once

// Later LibTorch renames the collectives of one tensor per rank. It warns about the old names, and
// its own classes override the new ones, so a class that must intercept them overrides the new ones
// too.
#include <torch/version.h>

// Of c10d::ProcessGroup.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
#define DDP_GROUP_ALL_GATHER_SINGLE all_gather_single
#define DDP_GROUP_REDUCE_SCATTER_SINGLE reduce_scatter_single
#define DDP_GROUP_ALL_TO_ALL_SINGLE all_to_all_single
#else
#define DDP_GROUP_ALL_GATHER_SINGLE _allgather_base
#define DDP_GROUP_REDUCE_SCATTER_SINGLE _reduce_scatter_base
#define DDP_GROUP_ALL_TO_ALL_SINGLE alltoall_base
#endif

// Of c10d::Backend.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
#define DDP_ALL_GATHER_SINGLE all_gather_single
#define DDP_REDUCE_SCATTER_SINGLE reduce_scatter_single
#define DDP_ALL_TO_ALL_SINGLE all_to_all_single
#else
#define DDP_ALL_GATHER_SINGLE _allgather_base
#define DDP_REDUCE_SCATTER_SINGLE _reduce_scatter_base
#define DDP_ALL_TO_ALL_SINGLE alltoall_base
#endif
