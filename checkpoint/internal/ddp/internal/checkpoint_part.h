#pragma once

#include <functional>
#include <string>

#include <ATen/core/ivalue.h>
#include <ddp/detail/checkpoint_part.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <ddp/internal/prepared_load.h>

namespace ddp {
class ShardReader;
}

namespace ddp::detail {

struct LoadContext {
  bool strict = true;
  std::string subject;            // the file; the texts of errors begin with it
  ShardReader* shards = nullptr;  // of the part's tensors that are cut; null for none
  /// Whether another stage of a pipeline has the tensor of a name. Null: there are no stages.
  std::function<bool(const std::string&)> is_elsewhere = nullptr;
};

/// A named part of a checkpoint, whose state is saved and loaded.
class CheckpointPart {
 public:
  CheckpointPart() = default;
  C10_DISABLE_COPY_AND_ASSIGN(CheckpointPart);
  virtual ~CheckpointPart() = default;

  /// The module, or the optimizer, whose state it is; null for another part.
  virtual torch::nn::Module* module() { return nullptr; }
  virtual torch::optim::Optimizer* optimizer() { return nullptr; }

  /// Whether state() is an optimizer_dict().
  virtual bool has_named_state() const { return false; }

  /// The ranks on which state() is called.
  enum class States { OfFirst, OfAll };
  /// Fetches from the other ranks what state() returns next. Called on every rank of a shared part,
  /// before state().
  ///
  /// Collective: over `group`, where it does anything.
  virtual void gather(const ProcessGroup& /*group*/, States /*states*/) {}

  /// Returns the present state. Its tensors may be the live ones.
  virtual c10::IValue state() = 0;

  /// Checks whether a state fits; changes nothing yet.
  ///
  /// \throws c10::Error  it does not.
  virtual PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) = 0;
};

}  // namespace ddp::detail
