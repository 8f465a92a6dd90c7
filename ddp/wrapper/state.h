#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel_base.h>
#include <ddp/internal/forward_count.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/reducer.h>

#include "checks/pass_inputs.h"
#include "checks/unaveraged_tensors.h"
#include "precision/model_precision.h"
#include "replay/pass_replay.h"
#include "replicas/pass_replica_check.h"
#include "replicas/replica_check.h"
#include "wrapper/model_tensors.h"
#include "wrapper/pass_terms.h"
#include "wrapper/shared_buffers.h"

namespace ddp {

/// The implementation of a wrapper: its members, and its work around each pass.
///
/// A forward pass communicates nothing. The averaged backward pass sends everything of a step: the
/// ranks' terms where those differ from step to step (a join, sample weights), the gradients, and
/// the source rank's buffers.
class DistributedDataParallelBase::State : public PassCompanion {
 public:
  State(
      DistributedDataParallelBase& owner, std::shared_ptr<torch::nn::Module> module,
      const DistributedDataParallelOptions& options);
  ~State() override;

  void before_forward(std::optional<int64_t> samples);
  void enter_forward() {
    precision_.begin_forward();
    replay_.enter_forward();
  }
  /// Whether note_inputs() is of use for the coming forward pass.
  bool wants_inputs() const {
    return inputs_.wants_inputs() && group()->getSize() > 1 && !is_in_join() && trains();
  }
  void note_inputs(const std::vector<at::Tensor>& inputs) { inputs_.note(inputs); }
  /// Whether the coming forward pass, whose arguments can be repeated, is to be noted.
  bool offer_call();
  void note_call(detail::CallArguments arguments, detail::RepeatCall repeat);
  void after_forward(std::vector<at::Tensor> outputs, bool outputs_complete);
  void forward_failed() noexcept;
  void sync_in_backward(std::vector<at::Tensor> outputs, bool outputs_complete);
  void count_samples(int64_t samples);
  void sync_buffers(int source = 0);
  void refresh();
  void also_average(const std::vector<at::Tensor>& tensors);
  void rebind(const ProcessGroup& group, CommHook hook);  // state_rebind.cpp
  void zero_grad(bool set_to_none);
  void check_replicas(const std::vector<torch::optim::Optimizer*>& optimizers);
  void also_compare(std::vector<torch::optim::Optimizer*> optimizers);
  void register_comm_hook(CommHook hook);
  void step_in_backward(std::shared_ptr<torch::optim::Optimizer> optimizer);
  void require_manual_finalization(bool required);
  bool finalizes_by_hand() const { return finalizes_by_hand_; }
  bool should_finalize_after_backward() const;
  void finalize_backward();

  // For sharded optimizers.
  std::shared_ptr<GradientShards> shard_gradients();
  bool has_divided_gradients() const { return shards_ != nullptr; }
  /// \param check  throws where the sharded optimizer was made for another reducer: called before
  ///        a forward pass with one that has no such function.
  void on_bucket_reduced(Reducer::OnBucketReduced act, std::function<void()> check) {
    reducer_->on_bucket_reduced(std::move(act));
    steps_by_bucket_ = true;
    check_stepper_ = std::move(check);
  }
  /// Changes with each new reducer.
  int64_t generation() const { return generation_; }
  bool is_in_join() const;
  /// Counts a sharded optimizer that was made or destroyed: with one, ranks without input step too.
  void count_sharded_optimizer(bool is_made) { sharded_optimizers_ += is_made ? 1 : -1; }

  // For joins.
  PassTermsAgreement& terms() { return in_group_->terms; }
  /// Throws where the ranks have different communication hooks in their first averaged pass.
  void compare_in_first_pass();
  /// Collective: yes. Blocks: host.
  void broadcast_model(int source, bool with_buffers);
  /// Whether averaged passes, and joins, give all ranks one rank's buffers.
  bool shares_buffers() const {
    return options_.forward_sync_buffers().value_or(options_.broadcast_buffers());
  }
  /// Whether optimizers step on ranks without input, too.
  bool steps_without_input() const { return optimizer_ || sharded_optimizers_ > 0; }

  bool must_wait() override;
  void begin(PassTerms& terms) override;
  void with_own_dtypes(c10::function_ref<void()> act) override { precision_.with_originals(act); }
  void autograd_done() override { precision_.end_backward(); }
  void failed(const std::string& why) override;
  void start(int source) override;
  void finish(c10::function_ref<void(c10d::Work&)> wait) override;
  bool asks() const override { return strays_.has_stepped(); }
  void answer() override { strays_.compare(group(), monitor()); }
  PassError error() override;
  uint64_t forwards() const override { return in_group_->forwards.since_restart(); }
  void end() override;

  const DistributedDataParallelOptions& options() const { return options_; }
  const ProcessGroup& group() const { return in_group_->group; }
  GroupMonitor& monitor() const { return *in_group_->monitor; }
  Reducer& reducer() const { return *reducer_; }
  torch::nn::Module& wrapped() const { return *tensors_.module(); }
  c10::Device device() const { return reducer_->parameters().front().tensor.device(); }
  const detail::InputPlacement& input_placement() const { return input_placement_; }
  const ModelPrecision& precision() const { return precision_; }
  bool* gradient_sync() { return &gradient_sync_; }

 private:
  /// How the gradients of a forward pass are handled.
  enum class Gradients { None, Local, Averaged };
  /// The agreement of the ranks before a reducer is built: none, compare their models, or also take
  /// rank 0's values.
  enum class Sync { Nothing, Descriptions, Values };

  /// Belongs to a group, and is made anew for another one.
  struct InGroup {
    InGroup(State& state, ProcessGroup ranks);

    const ProcessGroup group;
    const std::shared_ptr<GroupMonitor> monitor;
    ForwardCount forwards;
    PassTermsAgreement terms;
  };

  ForwardCount& training_forwards() { return in_group_->forwards; }
  std::vector<NamedParameter> checked_parameters();
  std::vector<NamedParameter> agreed_parameters(Sync sync);
  void rebuild();
  void build_reducer(std::vector<NamedParameter> parameters, const BucketOrder& order = {});
  BucketOrder agreed_order();
  void drop_gradients();
  void attach_optimizer(Reducer& reducer);
  void compare_models(const std::exception_ptr& error);
  void check_no_overlap() const;
  void check_hook_fits(const char* function) const;
  void check_between_steps(const char* function) const;
  std::vector<ReplicaValue> values_to_check(
      const std::vector<torch::optim::Optimizer*>& optimizers) const;
  std::string describe_drift(
      const std::vector<torch::optim::Optimizer*>& optimizers, const char* expectation) const;
  PassError voted(std::string text, std::vector<std::string> values) const;
  void check_no_low_reduction(const char* what) const;
  void count_samples_of_forward(std::optional<int64_t> samples);
  std::vector<at::Tensor> all_parameters() const;
  uint64_t hash_of_compared() const;
  void check_frozen_parameters();
  void check_replay(const std::vector<NamedParameter>& parameters) const;
  void check_inner_wrappers(const std::vector<NamedParameter>& parameters) const;
  void replay_if_due();
  void check_outputs_to_sync(const std::vector<at::Tensor>& outputs) const;
  void note_exception(const char* who_threw, bool others_wait) noexcept;
  /// Whether only tensors of also_average() are averaged.
  bool is_for_outside() const;
  Gradients gradients_of_forward() const;
  bool trains() const { return gradients_of_forward() == Gradients::Averaged; }

  DistributedDataParallelBase& owner_;
  const DistributedDataParallelOptions options_;  // without the group, which rebind() changes
  std::unique_ptr<InGroup> in_group_;
  ModelTensors tensors_;
  detail::InputPlacement input_placement_;
  ModelPrecision precision_;
  std::unique_ptr<Reducer> reducer_;
  std::unique_ptr<ParameterWatch> watch_;
  std::unique_ptr<SharedBuffers> buffers_;
  PassReplicaCheck replica_check_;
  PassReplay replay_;
  std::vector<torch::optim::Optimizer*> compared_;  // of also_compare()
  StrayTensors strays_;
  PassInputs inputs_;
  CommHook hook_;
  std::shared_ptr<torch::optim::Optimizer> optimizer_;  // of step_in_backward()
  bool gradient_sync_ = true;                           // false inside no_sync()
  bool finalizes_by_hand_ = false;
  /// Passes may skip parameters, and modules have collectives in the same group: a bucket would
  /// leave before such a collective on one rank, and after it on another.
  bool sends_after_autograd_ = false;
  std::shared_ptr<GradientShards> shards_;  // null unless ZeRO stage 2 divides the gradients
  int sharded_optimizers_ = 0;
  bool steps_by_bucket_ = false;  // of this reducer, in the backward pass
  std::function<void()> check_stepper_;
  int64_t generation_ = 0;
};

}  // namespace ddp
