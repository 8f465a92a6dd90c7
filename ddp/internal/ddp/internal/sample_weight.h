#pragma once

namespace ddp {

/// By how much more than an even part the gradients of the running backward pass count on this
/// rank: ranks * own samples / all samples, for a model with Reduction::SampleWeighted; 1 for
/// others, and for torch::autograd::grad.
///
/// The reducer weights a gradient when it has reached the parameter. A node that mixes the ranks'
/// gradients earlier multiplies what it sends by this number and divides what it receives by it: so
/// all that it mixes is weighted, and on each rank all gradients lack the rank's own weight. On a
/// rank without samples, whose loss is zero, the number is 1.
///
/// \throws c10::Error  where models of one backward pass have different parts of their samples.
///
/// Collective: over the model's group, once in a backward pass. Blocks: host.
double sample_weight();

}  // namespace ddp
