#pragma once

#include <optional>

#include <ddp/process_group_options.h>

namespace ddp {

/// \throws c10::ValueError  for a value that NCCL does not take.
void check_nccl_options(const NcclOptions& options);

/// Whether a group is made by splitting its parent's communicator, in which all ranks of the parent
/// take part. The same on all of them: init_process_group compares it.
bool splits_parent(const NcclOptions& options, const std::optional<c10::Device>& device_id);

}  // namespace ddp
