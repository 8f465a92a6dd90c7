#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <ddp/internal/tensor_broadcast.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>

#include "wrapper/model_tensors.h"

namespace ddp {

/// Broadcasts a module's buffers from one rank to the others in each averaged pass.
///
/// A graph that is still to run backward may have saved a buffer. Its backward pass would compute
/// with another rank's value, so writing the buffer raises its version, and autograd throws, as in
/// Python. Exceptions: a batch normalization's running statistics, which autograd saves but does
/// not read in training mode (two forward passes before a backward pass have to work), and a value
/// that is the same on both ranks, which is not written.
class SharedBuffers {
 public:
  /// \param enabled  with false nothing is shared.
  SharedBuffers(const torch::nn::Module& module, const Names& ignored, bool enabled)
      : module_(module), ignored_(ignored), enabled_(enabled) {}

  /// Call it before a forward pass of this rank that may change them.
  void expect_changes();
  /// Call it before a forward pass in evaluation mode whose graph may read them in backward.
  void expect_reads() { may_be_read_ = true; }
  /// Whether a forward pass may have changed them since they were shared.
  bool may_differ() const { return may_differ_; }

  /// Sends rank `source`'s, or starts to receive them.
  ///
  /// Collective: yes. Blocks: no.
  void start(int source, c10d::ProcessGroup& group);
  /// Waits for them with `wait`, and writes what was received into the module's buffers.
  void finish(c10::function_ref<void(c10d::Work&)> wait);

 private:
  struct Found {
    std::vector<at::Tensor> tensors;
    /// The TensorImpls of a batch normalization's running statistics. In training mode autograd
    /// saves them and does not read them.
    std::unordered_set<const void*> running_statistics;
  };

  Found find() const;
  void collect(
      const torch::nn::Module& owner, const std::string& prefix, SeenTensors& seen,
      Found& found) const;
  void write(const at::Tensor& buffer, const at::Tensor& received);
  bool is_unchanged(const at::Tensor& buffer) const;

  const torch::nn::Module& module_;
  const Names ignored_;
  const bool enabled_;
  Found found_;  // of the broadcast that runs
  TensorBroadcast broadcast_{Arrival::InCopy};
  bool may_differ_ = false;
  bool may_be_read_ = false;    // by a graph in evaluation mode, since they were shared
  bool on_accelerator_ = true;  // whether some were when they were last found; at first unknown
  // Versions of buffers on an accelerator, before the first forward pass since they were shared.
  std::unordered_map<const void*, int64_t> versions_;
  std::vector<at::Tensor> written_, received_;  // of an accelerator, while finish() runs
};

}  // namespace ddp
