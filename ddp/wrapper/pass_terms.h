#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/pass_companion.h>
#include <ddp/internal/reducer.h>

#include "join/join_round.h"
#include "wrapper/sample_weights.h"

namespace ddp {

/// Finds the terms of a model's averaged backward passes: the factor of this rank's gradients, and
/// the rank whose buffers all ranks take.
///
/// In a join and with Reduction::SampleWeighted the terms differ from pass to pass. The ranks then
/// exchange their status at the begin of the backward pass; in a join with
/// throw_on_early_termination already in forward, where a rank without input ends the step.
///
/// Threads: begin_backward() on one of autograd's threads, the rest on the training thread.
class PassTermsAgreement {
 public:
  using ReducerOf = std::function<Reducer&()>;

  /// \param model  outlives this; not used before the first pass.
  /// \param reducer_of  gives the model's reducer; not called before the first pass.
  PassTermsAgreement(
      Joinable& model, Reduction reduction, ProcessGroup group,
      std::shared_ptr<GroupMonitor> monitor, ReducerOf reducer_of);

  /// Sets the number of samples of the next forward pass, instead of what its arguments say.
  void set_samples_of_next_forward(int64_t samples) { samples_of_next_forward_ = samples; }
  /// Takes the number of samples of the forward pass that begins; `found` is that of its arguments.
  std::optional<int64_t> take_samples_of_forward(std::optional<int64_t> found);

  /// Counts the samples of the running forward pass, with Reduction::SampleWeighted.
  ///
  /// \throws c10::ValueError  for no number.
  void count_forward(std::optional<int64_t> samples);
  /// A forward pass with gradients begins.
  ///
  /// Collective: in a join with throw_on_early_termination.
  void begin_forward(bool is_averaged);
  /// \param complete  whether `outputs` are all tensors that the forward pass returned.
  void end_forward(const std::vector<at::Tensor>& outputs, bool complete);

  /// The terms of the next averaged backward pass that are known before it begins.
  const PassTerms& known() const { return known_; }

  /// Completes the terms of the averaged backward pass that begins.
  ///
  /// \throws c10::Error  for a model that is not listed in the join around it, and inside the
  ///         backward pass of another model of the join.
  ///
  /// Collective: in a join, and with Reduction::SampleWeighted.
  void begin_backward(PassTerms& terms);
  /// The terms of a pass that this rank, which has no input, joins.
  ///
  /// Collective: with Reduction::SampleWeighted, in a join of several objects.
  PassTerms of_joined_pass();
  /// The samples counted so far were in a pass, or their gradients are forgotten.
  void forget_samples();

  RankStatus local_status(bool active);

 private:
  bool is_weighted() const { return reduction_ == Reduction::SampleWeighted; }
  bool agrees_in_forward() const;
  void forget_zeroed_samples();
  JoinRound exchange_status();
  JoinRound gather_own_samples(const JoinRound& round, bool active);
  PassTerms terms_in(const JoinRound& round) const;

  Joinable& model_;
  const Reduction reduction_;
  const ProcessGroup group_;
  const std::shared_ptr<GroupMonitor> monitor_;
  const ReducerOf reducer_of_;
  SampleCounter samples_;                     // since the last averaged backward pass
  std::optional<double> samples_of_forward_;  // of the running forward pass
  std::optional<SampleWeights> weights_;      // with Reduction::SampleWeighted
  std::optional<int64_t> samples_of_next_forward_;
  bool unlisted_in_join_ = false;  // the last forward ran in an uneven join without this model
  PassTerms known_;
  std::vector<double> known_samples_;  // by rank, where the ranks agree in forward
};

}  // namespace ddp
