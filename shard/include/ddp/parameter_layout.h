#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>

namespace ddp {

/// \file
/// Where the elements of a model's parameters are, whichever way they are cut over the ranks.
/// Clipping, checkpoints and the comparisons of replicas read it.

/// A part of a tensor: indices [offset[d], offset[d] + size[d]) of each dimension d. Without
/// dimensions: the one element.
struct TensorBox {
  std::vector<int64_t> offset;  ///< of its first element
  std::vector<int64_t> size;    ///< >= 0
};
/// An older name of TensorBox.
using Box = TensorBox;

/// Elements [begin, end) of a box, counted along its last dimension first, as boxes in that order:
/// at most 2 d - 1 for d >= 1 dimensions.
///
/// \param begin  >= 0. \param end  at most the number of the box's elements.
DDP_API std::vector<TensorBox> boxes_of(const TensorBox& box, int64_t begin, int64_t end);

/// The elements of one parameter that this rank has.
struct ParameterLayout {
  std::string name;                   ///< in the whole model: "blocks.3.fc.weight"
  std::vector<int64_t> sizes;         ///< of the whole parameter
  at::ScalarType dtype = at::kFloat;  ///< of the whole parameter
  at::Tensor local;                   ///< the parameter itself, with this rank's elements
  /// Of the whole: the elements of `local`, its last dimension first. Elements of `local` after the
  /// last box are padding.
  std::vector<TensorBox> boxes;
  /// Their ranks have other elements, or other parameters: as the stages of a pipeline.
  std::vector<ProcessGroup> sharded_over;
  /// Their ranks have the same elements; may lack groups that the module does not know of.
  std::vector<ProcessGroup> replicated_over;
  /// Whether the gradient after a backward pass is a summand over replicated_over. The layers of
  /// this library sum it in the backward pass.
  bool partial = false;
  /// In a pipeline: the stage that it belongs to; of a tied parameter the first one. Parameters of
  /// the same name in other stages are others.
  std::optional<int64_t> stage = {};
};

/// A module that knows how parameters of it are cut.
class DDP_API ShardedModule {
 public:
  virtual ~ShardedModule();

  /// The layouts of some parameters below this module, by their names in it. Those that it does not
  /// name are whole on every rank.
  virtual std::vector<ParameterLayout> layouts() = 0;

  /// Whether backward sums the gradients of these parameters over the ranks, so that no other
  /// wrapper may do it again.
  virtual bool reduces_gradients() const { return false; }
  /// Why clip_grad_norm_() cannot take these gradients as they are: what it expects and got, and
  /// what to do. "" where it can.
  virtual std::string clipping_error() const { return ""; }
  /// Whether the names of its children are not part of names in the model: it is a wrapper.
  virtual bool is_transparent() const { return false; }
};

/// The layouts of all parameters of a module: what the modules in it that are a ShardedModule say,
/// and for other parameters one box, of all elements. A parameter that is registered several times
/// has one layout, with its first name. A DistributedDataParallel's names are those of the module
/// in it. The stages of a pipeline (PipelineStage), and modules in them, are cut over its ranks.
///
/// Collective: no. Cost: a walk over the module.
DDP_API std::vector<ParameterLayout> layouts_of(const torch::nn::Module& module);

}  // namespace ddp
