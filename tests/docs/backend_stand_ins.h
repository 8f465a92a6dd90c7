// Declares what docs/backends.md uses of other projects' headers.
#pragma once

#include <chrono>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace c10d {

class ProcessGroupXCCL : public Backend {
 public:
  ProcessGroupXCCL(const c10::intrusive_ptr<Store>& store, int rank, int size);
};

class ProcessGroupUCC : public Backend {
 public:
  explicit ProcessGroupUCC(
      const c10::intrusive_ptr<Store>& store, int rank = -1, int size = -1,
      std::chrono::duration<float> timeout = kBackendDefaultTimeout);
};

}  // namespace c10d

/// Functions of a made-up transport.
c10::intrusive_ptr<c10d::Work> fabric_sum(
    const std::vector<at::Tensor>& tensors, c10d::ReduceOp::RedOpType op);
c10::intrusive_ptr<c10d::Work> fabric_broadcast(const at::Tensor& tensor, int root);
c10::intrusive_ptr<c10d::Work> fabric_exchange(
    const std::vector<at::Tensor>& in, const std::vector<at::Tensor>& out, int root);

namespace oneccl_bindings_for_pytorch {

class ProcessGroupCCL : public c10d::Backend {
 public:
  static c10::intrusive_ptr<c10d::Backend> createProcessGroupCCL(
      const c10::intrusive_ptr<c10d::Store>& store, int rank = -1, int size = -1,
      std::chrono::milliseconds timeout = kNoTimeout);
};

}  // namespace oneccl_bindings_for_pytorch
