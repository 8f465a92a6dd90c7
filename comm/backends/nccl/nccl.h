// NCCL if it is built in (nccl.cpp), else a replacement that reports that it is not (no_nccl.cpp).
#pragma once

#include <optional>
#include <string>

#include <ddp/process_group_options.h>

#include "backends/registry.h"

namespace ddp {

constexpr int kMostCtas = 64;  // NCCL 2.28's number of channels

/// \throws c10::ValueError  for a value that NCCL does not take.
void check_nccl_options(const NcclOptions& options);

/// The options that choose NCCL's algorithms, which all ranks need alike: init_process_group
/// compares the text. "" where none is set.
std::string nccl_claim(const NcclOptions& options);

/// Whether a group is made by splitting its parent's communicator, in which all ranks of the parent
/// take part. The same on all of them: init_process_group compares it.
bool splits_parent(const NcclOptions& options, const std::optional<c10::Device>& device_id);

}  // namespace ddp

namespace ddp::backends {

/// Why no process can use NCCL: it is not built in. Empty if it is.
std::string why_no_nccl();

/// Connects to setup.device_id, if it is set, on a thread of its own, which is abandoned after the
/// deadline: NCCL's connecting has none. Else NCCL connects in the first collective, on the device
/// of its tensors.
///
/// Splits the communicator of setup.parent instead where splits_parent() says so.
///
/// \throws c10::DistBackendError  if it is not connected by the deadline.
BackendPtr make_nccl(const Setup& setup);

/// This rank's part in a split of setup.parent's communicator into groups that it is not in.
void sit_out_nccl(const Setup& setup);

/// Whether a collective, or device_id, has connected the ranks.
bool nccl_is_connected(c10d::Backend& backend);

/// A copy of NCCL's handle without its tensors; null for another backend's.
c10::intrusive_ptr<c10d::Work> nccl_without_tensors(c10d::Work& work);

/// Identifies the GPU in the whole world by its PCI bus, as NCCL does. Empty if CUDA cannot. Loads
/// the CUDA driver.
std::string id_of_gpu(int device);

}  // namespace ddp::backends
