#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/device_mesh.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

namespace ddp {

/// Functions for the gradients of any optimizer. A `ZeroRedundancyOptimizer` with stage 2 holds
/// this rank's parts of the gradients, which LibTorch's functions do not see. With these functions
/// a program can choose its optimizer at run time:
///
/// ```
/// std::unique_ptr<torch::optim::Optimizer> optimizer = make_optimizer(model);
/// ddp::zero_grad(*optimizer);
/// loss.backward();
/// ddp::clip_grad_norm_(*optimizer, 1.0);
/// optimizer->step();
/// ```

/// Clears the gradients that the optimizer steps on.
///
/// Optimizer::zero_grad() is not virtual: called through a reference to the base, it would not
/// clear the parts of stage 2, and the next backward pass would add to them.
///
/// \param set_to_none  false: fill them with zeros instead.
///
/// Collective: no.
DDP_API void zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none = true);

/// The norm that clip_grad_norm_() found. On a device the host waits for it when the program reads
/// it, and not before. printf() takes `static_cast<double>(norm)`.
///
/// Threads: one.
class DDP_API GradientNorm {
 public:
  /// \param value  a float64 scalar.
  explicit GradientNorm(at::Tensor value) : value_(std::move(value)) {}

  /// Blocks: host, where the gradients are on a device.
  operator double() const { return value_.item<double>(); }
  /// A float64 scalar on the gradients' device, as the result of torch.nn.utils.clip_grad_norm_.
  const at::Tensor& tensor() const { return value_; }

 private:
  at::Tensor value_;
};

/// Scales the gradients that the optimizer steps on, so that their norm over all parameters of all
/// its groups is at most `max_norm`. As torch::nn::utils::clip_grad_norm_, and right with stage 2.
///
/// Of parameters that are cut over ranks by their layers, a ZeroRedundancyOptimizer counts all
/// parts, and what all ranks have once. Of another optimizer each rank would see its own parts
/// alone: pass the module.
///
/// Half and bfloat16 gradients are added up in float, and the norms of tensors in double. Scales
/// with a factor of NaN or 0 where the norm is NaN or infinite, as torch's.
///
/// \param norm_type  above 0; infinity is the largest magnitude. Where nothing is cut also 0, which
///         counts the gradients, as LibTorch's.
/// \return the norm before scaling: converts to double.
/// \throws c10::ValueError  for another norm_type.
/// \throws c10::Error  for a ZeroRedundancyOptimizer with overlap, which has stepped already, and
///         in a join() with one, where ranks without input would not clip.
///
/// Collective: with a ZeroRedundancyOptimizer, one all-reduce over each group over which layers are
///   cut, and with stage 2 one over its ranks. Blocks: no, over a backend whose
///   collectives a device waits for; else host.
DDP_API GradientNorm
clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm, double norm_type = 2);

/// The same for the gradients of some parameters, which may be cut over groups of ranks.
///
/// ```
/// ddp::clip_grad_norm_(block->parameters(), 1.0, 2.0, {tensor_parallel});
/// ```
///
/// \param parameters  those without a gradient are left out, and tied ones count once. None on a
///         rank that holds no part. Not those of a ZeroRedundancyOptimizer of stage 2, which have
///         no gradients: pass the optimizer.
/// \param sharded_over  the groups over which the parameters are cut: each rank of such a group
///         holds another part of each tensor, or other tensors. Empty: every rank holds the whole.
/// \return the norm over all parts, the same on every rank that takes part.
/// \throws c10::ValueError  for a norm_type below 0 (or 0 where sharded_over has groups), and for
///         an empty group.
///
/// Collective: one all-reduce of a number over each group, in the order of `sharded_over`, on ranks
///   without gradients, too. Blocks: no, over a backend whose
///   collectives a device waits for; else host.
DDP_API GradientNorm clip_grad_norm_(
    const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2,
    const std::vector<ProcessGroup>& sharded_over = {});
/// The same for all parameters of a module, of which a layer that is cut, such as a
/// ColumnParallelLinear, says how it is (layouts_of()): its parts are added up, and what all ranks
/// have counts once; a tied parameter of a pipeline (TiedParameter) counts on its first stage.
///
/// \param sharded_over  further groups, over which all its parameters are cut. Their ranks may have
///         different modules, or ones without parameters. Of a pipeline's stage its process_group.
/// \throws c10::Error  gradients of a FullyShardedDataParallel are whole ones, from no_sync().
///
/// Collective: one all-reduce over each group that the layers are cut over; then one of a number
///   over each group of `sharded_over`.
DDP_API GradientNorm clip_grad_norm_(
    const torch::nn::Module& module, double max_norm, double norm_type = 2,
    const std::vector<ProcessGroup>& sharded_over = {});
/// The same, and equal on all ranks of the mesh, whether or not their modules have layers that are
/// cut over an axis.
///
/// \param norm_type  above 0.
/// \throws c10::ValueError  also for a parameter that is cut over ranks outside of the mesh, or
///         over only some ranks of an axis.
///
/// Collective: one all-reduce of a number over each axis with more than one rank, in their order.
DDP_API GradientNorm clip_grad_norm_(
    const torch::nn::Module& module, double max_norm, const DeviceMesh& mesh, double norm_type = 2);

/// Parameters that are cut over the same groups.
struct ShardedParameters {
  /// Those that this rank holds, whole or in part.
  std::vector<at::Tensor> parameters;
  /// As of clip_grad_norm_. Empty: every rank holds the whole tensors, which count once.
  std::vector<ProcessGroup> sharded_over;
};

/// Clips the gradients of several sets of parameters by one norm over all of them.
///
/// ```
/// ddp::clip_grad_norm_({{linear_weights, {tensor_parallel}}, {layer_norms, {}}}, 1.0);
/// ```
///
/// \param sets  as many on every rank, with the same groups in the same order; a rank that holds
///         nothing of a set passes no parameters.
///
/// Collective: one all-reduce over each group, of a number for each set that is cut over it, in the
///   order in which the groups first appear.
DDP_API GradientNorm
clip_grad_norm_(const std::vector<ShardedParameters>& sets, double max_norm, double norm_type = 2);

/// Clamps the gradients that the optimizer steps on to [-clip_value, clip_value].
///
/// \throws c10::Error  as clip_grad_norm_.
///
/// Collective: no.
DDP_API void clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value);

}  // namespace ddp
