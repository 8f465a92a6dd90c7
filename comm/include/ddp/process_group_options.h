#pragma once

#include <chrono>
#include <string>

#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

/// A c10d process group. Every function that takes c10d's takes this one.
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Options for `init_process_group` and `make_process_group`.
///
/// Example:
/// ```
/// ddp::init_process_group();  // under ddprun, torchrun, mpirun or srun
/// ddp::init_process_group(ddp::ProcessGroupOptions()
///                             .backend("gloo").init_method("tcp://10.0.0.1:29500")
///                             .rank(rank).world_size(4));
/// ```
struct ProcessGroupOptions {
  /// The backend that carries the tensors. "gloo" carries CPU and CUDA tensors. "shm" carries CPU
  /// tensors through memory that the ranks of a host share; on several hosts, one rank of each host
  /// exchanges the host's sum over Gloo. "nccl" carries CUDA tensors. "cpu:X,cuda:Y" chooses for
  /// each device. "mpi" is recognized, but LibTorch's binaries do not contain it.
  /// Default: "", which is shm for CPU tensors if ranks share a host, else gloo; and nccl for
  /// CUDA tensors if every rank has NCCL and a GPU of its own. The ranks agree on the choice.
  TORCH_ARG(std::string, backend) = "";
  /// How the ranks find each other. "env://": at MASTER_ADDR:MASTER_PORT; "tcp://host:port": at
  /// that address, where rank 0 listens; "file:///path": in a file that all ranks can access. tcp
  /// and file take "?rank=R&world_size=W". Default: "env://"
  TORCH_ARG(std::string, init_method) = "env://";
  /// A store that all ranks share, instead of `init_method`. Needs rank and world_size.
  TORCH_ARG(c10::intrusive_ptr<c10d::Store>, store) = {};
  /// This process's rank, from 0 to `world_size` - 1. Default: -1, from the environment
  TORCH_ARG(int, rank) = -1;
  /// Default: -1, from the environment
  TORCH_ARG(int, world_size) = -1;
  /// Limit of the time to make the group, all steps together, and then of each collective, as the
  /// host sees it. Over shm on several hosts the limit is four times as long if the rank that
  /// represents a host has stopped. Default: 30 min
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(30);
};

}  // namespace ddp
