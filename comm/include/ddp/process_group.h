#pragma once

#include <chrono>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/export.h>
#include <ddp/process_group_options.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// The group argument of a function, and the group of options; the default group if it is left out.
///
/// A type of its own because new_group() returns an empty ProcessGroup on non-members: passing that
/// on must be an error and must not select the default group.
class DDP_API GroupArg {
 public:
  /// The default group.
  GroupArg() = default;
  /// The given group, of any type that converts to a ProcessGroup, such as a derived class.
  template <
      typename Group, typename = std::enable_if_t<
                          std::is_convertible_v<Group&&, ProcessGroup> &&
                          !std::is_same_v<std::decay_t<Group>, GroupArg>>>
  GroupArg(Group&& group)  // NOLINT: implicit
      : group_(std::forward<Group>(group)), given_(true) {}

  /// \throws c10::Error  if it was left out and there is no default group, or if it is empty.
  ProcessGroup get() const;
  /// As get().
  operator ProcessGroup() const { return get(); }  // NOLINT: implicit
  /// The same without a default: null if it was left out.
  ///
  /// \throws c10::Error  if it is empty.
  ProcessGroup given() const { return given_ ? get() : nullptr; }

 private:
  ProcessGroup group_;
  bool given_ = false;
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

/// Shuts this group down; if it is the default group, also forgets it.
///
/// The collectives that the rank has started on a device end before, with the other ranks' part in
/// them. Afterwards the group starts none. A group that is dropped without this ends in the same
/// way.
///
/// \param group  that this library made.
/// \throws c10::Error  if it is empty.
///
/// Collective: with NCCL yes, over the group. Blocks: host, until NCCL has closed its connections,
/// or, after a failure, for at most a few seconds.
DDP_API void destroy_process_group(const ProcessGroup& group);

/// Aborts the job of a group: all groups that were made of one, on every rank.
///
/// Pending collectives end, on GPUs too, and every rank's next call in such a group throws, and
/// names this rank. For a rank that finds that the others cannot go on. An exception that destroys
/// the group does the same.
///
/// \param group  that this library made; default: the default group.
///
/// Collective: no. Blocks: host, at most three seconds.
/// Source: torch.distributed.distributed_c10d._abort_process_group, torch 2.11.0, which tells no
/// other rank.
DDP_API void abort_process_group(const GroupArg& group = {});

/// Whether there is a default group.
DDP_API bool is_initialized();

/// The default group.
///
/// \throws c10::Error  when there is none.
DDP_API ProcessGroup default_group();

/// Whether a launcher started this process: the environment names its rank.
DDP_API bool is_launched();

/// Makes a group of some ranks of a group.
///
/// Rank i of the new group is the i-th smallest of `ranks`. It has the parent's backends and
/// timeout.
///
/// \param ranks  of the parent, each once; not empty; the same on all ranks, in any order.
/// \param parent  a group that this library made.
/// \return  the group; empty on ranks that are not in it. Passing an empty group to a collective is
///          an error.
/// \throws c10::ValueError  for bad ranks. c10::Error if a rank does not call it in time, or passes
///         other ranks; both on every rank.
///
/// The new group, its parent and all groups made of them are one job: if one of them fails, all are
/// aborted, so that no rank waits in another group for a rank that has failed.
///
/// Collective: yes, over the parent, members or not. Blocks: host.
/// Cost: two exchanges of texts in the parent, and connecting; split_group() makes many groups at a
/// time.
DDP_API ProcessGroup new_group(const std::vector<int>& ranks, const GroupArg& parent = {});

/// The same with a timeout of its own, of its collectives; the same on all ranks. Connecting is
/// limited by the parent's.
///
/// \throws c10::ValueError  also for a timeout of less than 1 ms.
DDP_API ProcessGroup new_group(
    const std::vector<int>& ranks, std::chrono::milliseconds timeout, const GroupArg& parent = {});

/// Divides a group: ranks that give the same color make a group together, all groups at a time.
///
/// The members' order is that of their keys, and of their ranks in the parent where keys are equal.
///
/// \param color  at least 0, or -1: in no group.
/// \return  the group of this rank's color; empty for -1.
/// \throws c10::ValueError  for another color, on the rank that gave it; c10::Error on the others.
///         c10::Error if a rank does not call it in time, on every rank.
///
/// Collective: yes, over the parent. Blocks: host. Cost: as one new_group(), with whose groups the
/// new ones are one job.
/// Source: MPI_Comm_split; torch.distributed.split_group, torch 2.11.0, takes lists of ranks.
DDP_API ProcessGroup split_group(int color, int key = 0, const GroupArg& parent = {});

/// This process's rank in the group.
DDP_API int get_rank(const GroupArg& group = {});

/// Whether this process is rank 0 of the group: the one that prints, saves and downloads.
///
/// There is one in the whole group, not one a host. For one on each host, see get_local_rank().
DDP_API bool is_main(const GroupArg& group = {});

/// How many ranks the group has.
DDP_API int get_world_size(const GroupArg& group = {});

/// The name of the group's backend, such as "gloo": the one in use.
///
/// Where backend() named none, that is "shm", or "gloo" where the ranks cannot share memory. A
/// group with one backend for the CPU and another for GPUs gives "cpu:gloo,cuda:nccl", as backend()
/// takes it.
///
/// \throws c10::Error  on a rank that is not in the group.
///
/// Collective: no. Source: torch.distributed.get_backend, torch 2.11.0, which returns what the
/// program named, and "undefined" where it named none.
DDP_API std::string get_backend(const GroupArg& group = {});

/// This process's number among the launcher's processes on this host, from 0.
///
/// The value of LOCAL_RANK, else OMPI_COMM_WORLD_LOCAL_RANK, or that of another launcher. Where
/// none gave it, the number of lower ranks of the default group on this host, which
/// init_process_group() counts; containers count as hosts. 0 in a process that is alone or was not
/// launched, and without a launcher's value before init_process_group().
///
/// \throws c10::Error  when none is set and the default group is another library's, of several
///         ranks.
DDP_API int get_local_rank();

}  // namespace ddp
