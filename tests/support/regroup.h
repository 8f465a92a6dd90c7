// Another group of some ranks of a test, whatever became of the first one.
#pragma once

#include <chrono>
#include <string>

#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "support/ranks.h"

namespace ddp::testing {

/// \param name  of the group; another one for each.
/// \param rank  in the new group, which has `size` ranks and the backend of the first.
inline ProcessGroup regroup(const Rank& self, const std::string& name, int rank, int size) {
  return make_process_group(ProcessGroupOptions()
                                .backend(self.group->getBackend(at::kCPU)->getBackendName())
                                .store(c10::make_intrusive<c10d::PrefixStore>(name, self.store))
                                .rank(rank)
                                .world_size(size)
                                .timeout(std::chrono::seconds(20)));
}

}  // namespace ddp::testing
