#pragma once

#include <memory>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace ddp {

/// Counts the samples whose gradients the next averaged backward pass sends, for
/// Reduction::SampleWeighted. The samples of a forward pass count once a backward pass goes through
/// its outputs, and again for another averaged pass; a forward pass without one (a skipped batch, a
/// metric) has no weight.
///
/// Threads: autograd's threads report backward passes; the training thread calls the rest.
class SampleCounter {
 public:
  SampleCounter();

  /// A forward pass of `samples` samples returned `outputs`.
  ///
  /// \param complete  whether these are all tensors that it returned. If not, and none has a graph,
  ///        whether a backward pass follows is unknown, and the samples count at once.
  /// \param counts  whether the samples count; add() may have counted them.
  void add_forward(
      double samples, const std::vector<at::Tensor>& outputs, bool complete, bool counts);

  /// Counts `samples` samples at once.
  void add(double samples);

  /// Counts all forward passes that the backward pass of the calling thread goes through.
  void begin_backward();

  using Nodes = std::unordered_set<torch::autograd::Node*>;
  /// Whether `nodes`, of a backward pass, go through a forward pass.
  bool is_in(const Nodes& nodes) const;
  /// The number of samples of all forward passes that `nodes` go through.
  double samples_of(const Nodes& nodes) const;

  /// The number of samples counted since the last `clear`, those of each forward pass once.
  double counted() const;
  void clear();

 private:
  struct Forward;
  struct Counts;

  std::vector<std::shared_ptr<Forward>> forwards_in(const Nodes& nodes) const;

  const std::shared_ptr<Counts> counts_;  // hooks on outputs share it, and may outlive this
};

}  // namespace ddp
