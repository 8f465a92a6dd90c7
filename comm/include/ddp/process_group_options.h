#pragma once

#include <chrono>
#include <optional>
#include <string>

#include <c10/core/Device.h>
#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

/// A c10d process group. Every function that takes c10d's takes this one.
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Options of the backend "nccl", for a group and those made of it. The names are those of
/// ProcessGroupNCCL.Options and ncclConfig_t; NCCL's guide says what each does.
struct NcclOptions {
  /// Collectives run on a stream of high priority: without it, queued kernels of the backward pass
  /// delay a bucket. Default: true, unlike PyTorch
  TORCH_ARG(bool, is_high_priority_stream) = true;
  /// The fewest thread blocks that a collective takes, from 1 to 64. Default: NCCL chooses
  TORCH_ARG(std::optional<int>, min_ctas) = {};
  /// The most thread blocks that a collective takes, from 1 to 64. Default: NCCL chooses
  TORCH_ARG(std::optional<int>, max_ctas) = {};
  /// Thread blocks a cluster, from 0 to 8, on GPUs that have clusters. Default: NCCL chooses
  TORCH_ARG(std::optional<int>, cga_cluster_size) = {};
  /// Whether NCCL's calls block the host until a communicator is connected. Default: LibTorch
  /// chooses
  TORCH_ARG(std::optional<bool>, blocking) = {};
  /// Set, with device_id: a group that is made of another one splits its communicator
  /// (ncclCommSplit), and shares its resources if true. While a rank is missing in a split, nothing
  /// can abort the parent. Default: unset, a group connects anew
  TORCH_ARG(std::optional<bool>, split_share) = {};
  /// The thread blocks that NCCL leaves to the program: 0, none; 1, those that it can do without at
  /// the same speed (NCCL_CTA_POLICY_EFFICIENCY); 2, all where copy engines can do the work
  /// (NCCL_CTA_POLICY_ZERO), which needs registered memory. The same on every rank. Default: NCCL
  /// chooses
  TORCH_ARG(std::optional<int>, cta_policy) = {};
  /// The thread blocks of a collective over NVLink SHARP (NVLS), from 1 to 64; the same on every
  /// rank. Default: NCCL chooses
  TORCH_ARG(std::optional<int>, nvls_ctas) = {};
  /// Whether the network's switches may add up (CollNet, as InfiniBand SHARP), with a plugin of
  /// NCCL's; the same on every rank. Default: NCCL chooses
  TORCH_ARG(std::optional<bool>, collnet) = {};
  /// The class of its packets for the network's quality of service, from 0 to 255. Default: NCCL
  /// chooses
  TORCH_ARG(std::optional<int>, traffic_class) = {};
  /// The communicator's name in NCCL's logs and profilers: at most 64 printable characters of
  /// ASCII. Groups that are made of this one have it, too. Default: "", none
  TORCH_ARG(std::string, comm_name) = "";
};

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
  /// exchanges the host's sum over Gloo. "nccl" carries CUDA tensors. "mpi" carries CPU tensors
  /// over MPI, in programs that are linked with ddp::mpi. "cpu:X,cuda:Y" chooses for each device,
  /// also among backends of the program's own (`register_backend`).
  /// Default: "", which is shm for CPU tensors if ranks share a host, else gloo; and nccl for
  /// CUDA tensors if every rank has NCCL and a GPU of its own. The ranks agree on the choice.
  TORCH_ARG(std::string, backend) = "";
  /// How the ranks find each other. "env://": at MASTER_ADDR:MASTER_PORT; "tcp://host:port": at
  /// that address, where rank 0 listens; "file:///path": in a file that all ranks can access. tcp
  /// and file take "?rank=R&world_size=W". "mpi://": MPI, which has started the ranks, tells them
  /// where rank 0 is; so does "env://" for the backend mpi without MASTER_ADDR. Default: "env://"
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
  /// This rank's GPU: cuda:N. The group makes it current, and connects NCCL before it returns, as
  /// do groups made of it; a rank that dies meanwhile is an error within the timeout. A barrier
  /// then waits for the GPU. Default: unset, the local rank's GPU, and NCCL connects in the first
  /// collective, where nothing bounds it
  TORCH_ARG(std::optional<c10::Device>, device_id) = {};
  /// Only for the backend "nccl".
  TORCH_ARG(NcclOptions, nccl) = {};
};

}  // namespace ddp
