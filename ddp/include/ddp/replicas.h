#pragma once

#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>

namespace ddp {

/// Whether all ranks' parameters and buffers have the same names, shapes and bits: NaN equals
/// itself, and 0 differs from -0.
///
/// Parameters that are cut over ranks of the group (layouts_of()) are left out.
///
/// For any module, wrapped or not. The wrapped model's own `check_replicas()` also names the
/// difference, and leaves out ignored parameters and buffers.
///
/// \return the same on every rank.
/// \throws c10::ValueError  on every rank, where one has a tensor without a dense storage.
///
/// Collective: yes. Blocks: host. Cost: reads every byte once, and exchanges a hash.
DDP_API bool replicas_equal(const torch::nn::Module& module, const GroupArg& group = {});

}  // namespace ddp
