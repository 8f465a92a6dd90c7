// The settings that backends are made from.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ddp/process_group_options.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/deadline.h"
#include "base/network_interface.h"

namespace ddp::backends {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

/// The settings that every backend is made from.
struct Setup {
  c10::intrusive_ptr<c10d::Store> store;  // of this backend alone
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{0};  // of its collectives
  Deadline connect_by{timeout};
  std::string group_name;
  std::vector<uint64_t> global_ranks;  // of the group's members, in group order
  GlooDevices gloo_devices;
  bool required = true;    // the user named the backend; else another one may replace it
  BackendPtr parent = {};  // of the group that this one is made of, for the same tensors
  std::vector<int> parent_ranks = {};         // of the members, in that group
  std::optional<c10::Device> device_id = {};  // of a backend of GPUs: to connect at once
  NcclOptions nccl = {};
};

}  // namespace ddp::backends
