#pragma once

#include <ddp/process_group_options.h>

namespace ddp {

/// \throws c10::ValueError  for a value that NCCL does not take.
void check_nccl_options(const NcclOptions& options);

}  // namespace ddp
