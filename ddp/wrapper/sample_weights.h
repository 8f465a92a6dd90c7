#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/join.h>

#include "wrapper/sample_counter.h"

namespace ddp {

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
  SampleWeights(const SampleWeights&) = delete;
  SampleWeights& operator=(const SampleWeights&) = delete;

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
