#pragma once

#include <ddp/export.h>
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

/// Scales the gradients that the optimizer steps on, so that their norm over all parameters of all
/// its groups is at most `max_norm`. As torch::nn::utils::clip_grad_norm_, and right with stage 2.
///
/// \param norm_type  above 0; infinity is the largest magnitude.
/// \return the norm before scaling.
/// \throws c10::ValueError  for another norm_type.
/// \throws c10::Error  for a ZeroRedundancyOptimizer with overlap, which has stepped already, and
///         in a join() with one, where ranks without input would not clip.
///
/// Collective: with stage 2, one all-reduce of a number. Blocks: host.
DDP_API double clip_grad_norm_(
    torch::optim::Optimizer& optimizer, double max_norm, double norm_type = 2);

/// Clamps the gradients that the optimizer steps on to [-clip_value, clip_value].
///
/// \throws c10::Error  as clip_grad_norm_.
///
/// Collective: no.
DDP_API void clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value);

}  // namespace ddp
