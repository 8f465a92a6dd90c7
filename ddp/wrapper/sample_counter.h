#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Counts the samples whose gradients the next averaged backward pass sends, for
/// Reduction::SampleWeighted. The samples of a forward pass count once a backward pass goes through
/// its outputs; a forward pass without one (a skipped batch, a metric) has no weight.
///
/// Threads: autograd's threads report backward passes; the training thread calls the rest.
class SampleCounter {
 public:
  SampleCounter();

  /// A forward pass of `samples` samples returned `outputs`.
  ///
  /// \param complete  whether these are all tensors that it returned. If not, and none has a graph,
  ///        whether a backward pass follows is unknown, and the samples count at once.
  void add_forward(double samples, const std::vector<at::Tensor>& outputs, bool complete);

  /// Counts `samples` samples at once.
  void add(double samples);

  /// Counts all forward passes that the backward pass of the calling thread goes through.
  void begin_backward();

  /// The number of samples counted since the last `clear`.
  double counted() const;
  void clear();

 private:
  struct Forward;
  struct Counts;

  const std::shared_ptr<Counts> counts_;  // hooks on outputs share it, and may outlive this
};

}  // namespace ddp
