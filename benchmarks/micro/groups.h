// A second group of the same ranks, over another backend.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace benchmarks {

inline ddp::ProcessGroup gloo_beside(const ddp::ProcessGroup& group) {
  return ddp::make_process_group(
      ddp::ProcessGroupOptions()
          .backend("gloo")
          .store(c10::make_intrusive<c10d::PrefixStore>("gloo", group->getStore()))
          .rank(group->getRank())
          .world_size(group->getSize()));
}

}  // namespace benchmarks
