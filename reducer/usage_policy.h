#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ddp/internal/autograd_node.h>
#include <ddp/internal/reducer.h>

#include "backward_pass.h"
#include "forward_outputs.h"
#include "problem_report.h"

namespace ddp {

/// Which parameters a backward pass has to bring gradients for, and what is wrong when it does not.
///
/// Threads: mark_used() on autograd's, one per parameter at a time; the rest as the Reducer.
class UsagePolicy {
 public:
  using Explain = Reducer::ExplainMissing;

  /// \param accumulators  of the parameters; they outlive the policy, as the parameters do.
  static std::unique_ptr<UsagePolicy> make(
      const ReducerOptions& options, const std::vector<NamedParameter>& parameters,
      const std::vector<NodePtr>& accumulators);

  UsagePolicy(
      const std::vector<NamedParameter>& parameters, const std::vector<NodePtr>& accumulators);
  virtual ~UsagePolicy() = default;

  /// Whether the ranks tell each other which parameters they used.
  virtual bool tracks_usage() const { return false; }
  /// Whether the coming pass only counts gradients.
  virtual bool is_counting() const { return false; }

  /// Parameters have other accumulators than before.
  virtual void accumulators_changed() {}

  /// What forward passes since the last averaged backward pass led to.
  ///
  /// \param pass  the coming one: parameters that cannot get a gradient become unused in it.
  /// \param alone  no other forward pass shares that backward pass.
  void add_forward(const ForwardOutcome& outcome, bool alone, BackwardPass& pass);
  /// Whether every backward pass of this reducer's begins at an output that is known.
  bool outputs_are_known() const { return outputs_.are_complete(); }

  void mark_used(size_t parameter) { used_[parameter] = 1; }
  /// By parameter: it had a gradient since the last averaged pass.
  const std::vector<char>& used() const { return used_; }
  void clear_used();
  /// Whether there are used parameters, and no gradients: zero_grad() took them. Those count as
  /// unused then.
  bool forget_discarded_gradients();

  /// Gradients by parameter until it is ready; 0 for none.
  const std::vector<uint32_t>& expected() const { return expected_; }

  /// What is wrong at the end of a pass.
  virtual std::vector<Problem> check(const BackwardPass& pass);
  /// A pass has ended well, in which this rank had input.
  virtual void end_pass(const BackwardPass& pass) { (void)pass; }
  /// What is wrong with a gradient that was not expected; nothing where it does no harm.
  virtual std::vector<Problem> check_extra(size_t parameter, const BackwardPass& pass) const;

  void explain_missing(Explain explain) { explain_ = std::move(explain); }

 protected:
  virtual void foresee(const std::vector<torch::autograd::Node*>& /*outputs*/, BackwardPass&) {}
  /// \param why  as in MissingGradient, or one of the reasons that the graph tells.
  virtual std::string remedy_of_missing(const std::string& why) const;
  /// Of parameters that may be without a gradient, those that can get none any more.
  std::vector<Problem> check_detached(const BackwardPass& pass);
  std::vector<Problem> check_missing(const BackwardPass& pass) const;

  const std::vector<NamedParameter>& parameters_;
  const std::vector<NodePtr>& accumulators_;
  std::vector<uint32_t> expected_;  // by parameter

 private:
  std::vector<MissingGradient> why_detached(const std::vector<size_t>& parameters) const;
  std::vector<char> reached_parameters() const;

  ForwardOutputs outputs_;
  Explain explain_;
  std::vector<char> used_;          // by parameter
  std::vector<char> known_unused_;  // by parameter: was without a gradient before
};

}  // namespace ddp
