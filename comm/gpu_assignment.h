#pragma once

#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "environment.h"
#include "roll_call.h"

namespace ddp {

/// What a rank knows of its GPU before NCCL is set up.
struct GpuAssignment {
  std::string why_not;        // why this rank cannot use NCCL; empty when it can
  std::optional<int> device;  // the one to make current; nothing when only the program knows it
  std::string id;             // names the physical GPU in the whole world; empty when not known
};

/// Chooses among the GPUs that this process sees: the only one, whatever the local rank, because
/// launchers may show each process no more than its own; else the one with the local rank's number.
///
/// \throws c10::ValueError  when the local rank is needed and malformed.
GpuAssignment choose_gpu(const std::optional<Setting>& local_rank, int visible_gpus);

/// Whether every rank has a GPU of its own, so that all of them can use NCCL.
///
/// No rank can tell for the others: another rank may see other GPUs, or the same one.
///
/// \param votes  a store that nothing else writes to.
/// \param required_by  the backend that the user named: a rank without a GPU of its own is an
/// error.
///        Empty: it is none.
/// \return  the same on all ranks.
/// \throws c10::Error  on every rank, with the reason of one that cannot, when required.
///
/// Collective: yes. Blocks: host, as `call_roll` does.
bool all_have_gpus(
    const RollCall& roll, c10d::Store& votes, const GpuAssignment& mine,
    const std::string& required_by);

}  // namespace ddp
