#pragma once

#include <ddp/export.h>

#include <chrono>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

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

/// Connects to the other ranks and makes a group of all of them, which becomes the default group.
///
/// Rank and world size come from the options, else from RANK and WORLD_SIZE (ddprun, torchrun),
/// else from Open MPI's variables, else from SLURM's: the launcher that started last decides. A
/// process that no launcher has started (`./train`, a debugger) is a world of one rank. Gloo
/// listens on GLOO_SOCKET_IFNAME, else on the interface that leads to rank 0. With NCCL, the GPU
/// with the local rank's number becomes the current one if a launcher set a local rank; a process
/// that sees only one GPU uses that one.
///
/// \return  a group whose backends are connected (Gloo) or will be in the first collective (NCCL);
///         either on all ranks or, with an error, on none.
/// \throws c10::ValueError  on a bad option, URL or environment variable, naming it and its value.
/// \throws c10::Error  if there is a default group already, a backend cannot be used, the port
///         is taken, or not all ranks arrive within the timeout: then every rank that arrived
///         throws, and names the missing ones. A name of rank 0's host that does not resolve is
///         retried for 30 s of the timeout.
///
/// Collective: yes, over the whole world. Blocks: host.
/// Threads: the default group belongs to the process; ranks that are threads of one process use
/// `make_process_group` and pass their groups explicitly.
DDP_API ProcessGroup init_process_group(const ProcessGroupOptions& options = {});

/// The same, but leaves the default group alone.
DDP_API ProcessGroup make_process_group(const ProcessGroupOptions& options = {});

/// Shuts the default group down and forgets it; without one, does nothing.
///
/// Waits for no other rank. Wait for the handles of pending collectives before. A process that a
/// rank forked only drops the group, here and when it exits, because it is not the rank.
DDP_API void destroy_process_group();

/// Whether there is a default group.
DDP_API bool is_initialized();

/// The default group.
///
/// \throws c10::Error  when there is none.
DDP_API ProcessGroup default_group();

/// Whether a launcher started this process: the environment names its rank.
DDP_API bool is_launched();

/// Makes a group of some ranks of the default group.
///
/// Rank i of the new group is the i-th smallest of `ranks`. It has the default group's backends
/// and timeout.
///
/// \param ranks  of the default group, each once; not empty; the same on all ranks, in any order.
/// \return  the group; empty on ranks that are not in it. Passing an empty group to a collective is
///          an error.
/// \throws c10::ValueError  for bad ranks. c10::Error if a rank does not call it in time, or passes
///         other ranks; both on every rank.
///
/// Collective: yes, over the default group, members or not. Blocks: host.
DDP_API ProcessGroup new_group(const std::vector<int>& ranks);

/// The group argument of a function; the default group if it is left out.
///
/// A type of its own because `new_group` returns an empty ProcessGroup on non-members: passing that
/// on must be an error and must not select the default group.
class DDP_API GroupArg {
 public:
  /// The default group.
  GroupArg() = default;
  /// The given group, of any type that converts to a ProcessGroup, such as a derived class.
  template <
      typename Group, typename = std::enable_if_t<std::is_convertible_v<Group&&, ProcessGroup>>>
  GroupArg(Group&& group)  // NOLINT: implicit
      : group_(std::forward<Group>(group)), given_(true) {}

  /// \throws c10::Error  if it was left out and there is no default group, or if it is empty.
  ProcessGroup get() const;

 private:
  ProcessGroup group_;
  bool given_ = false;
};

/// This process's rank in the group.
DDP_API int get_rank(const GroupArg& group = {});

/// Whether this process is rank 0 of the group: the one that prints, saves and downloads.
///
/// There is one in the whole group, not one a host. For one on each host, see get_local_rank().
DDP_API bool is_main(const GroupArg& group = {});

/// How many ranks the group has.
DDP_API int get_world_size(const GroupArg& group = {});

/// This process's number among the launcher's processes on this host, from 0.
///
/// The value of LOCAL_RANK, else OMPI_COMM_WORLD_LOCAL_RANK, else SLURM_LOCALID; 0 in a process
/// that is alone or was not launched.
///
/// \throws c10::Error  when none is set and there are several ranks.
DDP_API int get_local_rank();

}  // namespace ddp
