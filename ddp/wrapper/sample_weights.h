// Weights of samples, for Reduction::SampleWeighted.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/join.h>
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

/// The weights of a model with Reduction::SampleWeighted within a backward pass, for
/// sample_weight().
///
/// A pass takes the weights that the ranks agreed on for its averages. Before they do, and in a
/// pass under no_sync(), it takes the ranks' parts of its own samples. These have to turn out to be
/// those of the averaged pass, which is an error of every rank where they do not: what a collective
/// has mixed cannot be weighted anew.
///
/// Threads: any.
class SampleWeights {
 public:
  /// Whether the backward pass of the calling thread accumulates gradients of the model.
  using Accumulates = std::function<bool()>;

  /// \param model, samples  outlive this.
  SampleWeights(
      Joinable& model, const SampleCounter& samples, ProcessGroup group,
      std::shared_ptr<GroupMonitor> monitor, Accumulates accumulates);
  ~SampleWeights();
  C10_DISABLE_COPY_AND_ASSIGN(SampleWeights);

  /// Has backward passes through `outputs` of the model use these weights, passes inside of them as
  /// well.
  void watch(const std::vector<at::Tensor>& outputs);

  /// Called when the ranks have agreed on the samples of an averaged pass, by rank.
  ///
  /// \throws AgreedError  where a pass since the last averaged one took other weights.
  void agree(std::vector<double> samples);
  /// Whether passes go through collectives, as far as one has begun to.
  bool mix() const;
  /// Called when an averaged pass has ended.
  void end();

 private:
  friend double sample_weight();
  struct Running;

  void enter();
  double weight_in(const Running& running);

  Joinable& model_;
  const SampleCounter& samples_;
  const ProcessGroup group_;
  const std::shared_ptr<GroupMonitor> monitor_;
  const Accumulates accumulates_;
  const std::shared_ptr<SampleWeights*> self_;  // of hooks that may outlive this; null after it
  mutable std::mutex mutex_;
  std::vector<double> agreed_;              // by rank, during an averaged pass
  std::vector<std::vector<double>> taken_;  // by pass since the last averaged one; by rank
  int last_task_ = -1;                      // autograd's number of the last of these passes
  bool mix_ = false;
};

}  // namespace ddp
