// Parts with parameters of which each rank has a part: a model with layers that are cut over a
// group, and its optimizer.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ddp/parameter_layout.h>
#include <ddp/sharded_tensor.h>

#include <ddp/internal/checkpoint_part.h>
#include <ddp/internal/module_tensors.h>

namespace ddp::detail {

/// This rank's shards of a module's parameters and buffers: a tensor each, with its first name.
std::vector<ShardedTensor> shards_of_module(const torch::nn::Module& module);

/// The further names of the tensors that its modules share, by their first names.
std::map<std::string, std::vector<std::string>> other_names_in(const torch::nn::Module& module);

/// Returns the value in place of a field of a parameter's state, of the parameter's number.
using ReplaceField =
    std::function<c10::IValue(size_t index, const c10::IValue& field, const c10::IValue& value)>;

/// Marks a saved state in which the numbers of parameters are valid on one rank alone: a
/// pipeline's.
constexpr const char* kByName = "by_name";

/// Whether a value is an optimizer_dict(), by its form.
bool has_state(const c10::IValue& optimizer);

/// Returns an optimizer_dict() with other values in the parameters' state.
c10::IValue replace_in_state(const c10::IValue& optimizer, const ReplaceField& replace);

/// The names of an optimizer's parameters in order, a line each.
std::string names_of_parameters(
    const torch::optim::Optimizer& optimizer, const LayoutsByParameter& layouts);

/// A model that is cut over the ranks, for a file that has it whole: loads this rank's elements.
class CutModelPart : public CheckpointPart {
 public:
  explicit CutModelPart(CheckpointPartPtr whole) : whole_(std::move(whole)) {}

  torch::nn::Module* module() override { return whole_->module(); }
  c10::IValue state() override { return whole_->state(); }
  PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) override;

 private:
  const CheckpointPartPtr whole_;
};

/// An optimizer's part without the tensors of its state, in whose places are their names among the
/// shards: "exp_avg/blocks.3.fc.weight".
class CutOptimizerPart : public CheckpointPart {
 public:
  /// \param whole  writes and reads the state of this rank's parameters, as optimizer_dict().
  /// \param layouts  of the parameters; those without one are whole.
  CutOptimizerPart(CheckpointPartPtr whole, std::function<LayoutsByParameter()> layouts);

  torch::optim::Optimizer* optimizer() override { return whole_->optimizer(); }
  void gather(const ProcessGroup& group, States states) override;
  c10::IValue state() override;
  PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) override;

  /// The tensors of the state, after a gather(); nothing without one. The next state() has their
  /// names.
  std::vector<ShardedTensor> take_shards();
  /// Whether the optimizers of all ranks have the same parameters. Else the state goes by names.
  void set_alike(bool alike) { is_alike_ = alike; }

 private:
  bool goes_by_name(const std::vector<ParameterLayout>& layouts) const;
  std::vector<ParameterLayout> layouts_in_order() const;

  const CheckpointPartPtr whole_;
  const std::function<LayoutsByParameter()> layouts_;
  bool is_alike_ = true;
  bool is_gathered_ = false;  // since the last take_shards()
  c10::IValue state_;         // of the last take_shards()
};

}  // namespace ddp::detail
