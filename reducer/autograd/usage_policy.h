#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/autograd_node.h>
#include <ddp/internal/reducer.h>
#include <torch/csrc/autograd/function.h>

#include "pass/backward_pass.h"
#include "status/problem_report.h"

namespace ddp {

/// The nodes of autograd's graph that made the outputs of the forward passes since the last reduced
/// backward pass. Keeps no graph alive.
///
/// Threads: one at a time.
class ForwardOutputs {
 public:
  using Node = torch::autograd::Node;

  void clear();

  /// \param complete  whether `outputs` are all tensors that the forward pass returned.
  /// \return the nodes of these outputs.
  std::vector<Node*> add(const std::vector<at::Tensor>& outputs, bool complete);

  /// Whether every backward pass through a forward passes a node that made one of its outputs:
  /// false when some outputs are unknown, or are parameters.
  bool are_complete() const { return complete_; }

  /// Whether the backward pass that the calling thread runs goes through one of the nodes.
  bool are_in_backward() const;

  /// The nodes; empty when they are not complete, or one of them no longer exists.
  std::vector<NodePtr> nodes() const;

 private:
  bool complete_ = true;
  std::vector<WeakNodePtr> nodes_;
};

/// Decides for which parameters a backward pass must make gradients, and finds the problems when it
/// does not.
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

  /// Whether the ranks exchange which parameters they used.
  virtual bool tracks_usage() const { return false; }
  /// Whether the next pass only counts gradients.
  virtual bool is_counting() const { return false; }

  /// Called when parameters have other accumulators than before.
  virtual void accumulators_changed() {}

  /// Adds the outputs of a forward pass to those since the last reduced backward pass.
  ///
  /// \param pass  the next one: parameters that cannot get a gradient become unused in it.
  /// \param alone  no other forward pass shares that backward pass.
  void add_forward(const ForwardOutcome& outcome, bool alone, BackwardPass& pass);
  /// Whether every backward pass of this reducer's begins at an output that is known.
  bool outputs_are_known() const { return outputs_.are_complete(); }
  /// Whether the backward pass that the calling thread runs goes through one of the outputs.
  bool runs_through_outputs() const { return outputs_.are_in_backward(); }

  void mark_used(size_t parameter) { used_[parameter] = 1; }
  /// By parameter: it had a gradient since the last reduced pass.
  const std::vector<char>& used() const { return used_; }
  void clear_used();
  /// Called before clear_used() at the end of a pass in which this rank had input.
  void compare_passes();
  /// Whether all passes so far, at least one, used the same parameters.
  bool is_alike_in_all_passes() const { return is_alike_ && !used_first_.empty(); }
  /// Clears the usage if parameters were used, but none has a gradient any more: zero_grad()
  /// removed them.
  ///
  /// \return whether it did.
  bool clear_usage_of_zeroed_grads();

  /// Gradients by parameter until it is ready; 0 for none.
  const std::vector<uint32_t>& expected() const { return expected_; }

  /// Finds the problems at the end of a pass.
  virtual std::vector<Problem> check(const BackwardPass& pass);
  /// Called when a pass in which this rank had input has ended without an error.
  virtual void end_pass(const BackwardPass& pass) { (void)pass; }
  /// Finds the problem of a gradient that was not expected; none where it does no harm.
  virtual std::vector<Problem> check_extra(size_t parameter, const BackwardPass& pass) const;

  void explain_missing(Explain explain) { explain_ = std::move(explain); }

 protected:
  virtual void mark_unreachable(
      const std::vector<torch::autograd::Node*>& /*outputs*/, BackwardPass&) {}
  /// \param why  as in MissingGradient, or one of the reasons found in the graph.
  virtual std::string remedy_of_missing(const std::string& why) const;
  /// Finds parameters that can no longer get a gradient, where a missing gradient is allowed.
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
  std::vector<char> used_first_;    // in the first pass; empty before its end
  bool is_alike_ = true;            // all passes since then used these
  std::vector<char> known_unused_;  // by parameter: check_detached() has seen it without a gradient
};

}  // namespace ddp
