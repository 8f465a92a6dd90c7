#pragma once

#include <cstdint>

namespace ddp::plan {

constexpr double kFloatBytes = 4;

/// How a program that ran differs from the formulas; 1 and 0: as they say.
struct Corrections {
  double state = 1;         // bytes of parameters, gradients and the optimizer
  double activations = 1;   // bytes
  double beside = 0;        // bytes of a rank that the formulas do not have
  double tensor_bytes = 1;  // of sums over tp
  double data_bytes = 1;    // of gradients and gathers over dp
};

/// A transformer in float32, trained with AdamW.
struct Model {
  int64_t parameters = 0;   // of the whole model; a table of tokens that is the head, too, once
  int64_t layers = 1;       // blocks of attention and a feed-forward network
  int64_t hidden = 1;       // features of a position
  int64_t heads = 1;        // of attention
  int64_t sequence = 1;     // positions of a sample
  int64_t vocabulary = 0;   // rows of the table of tokens; 0: all parameters are in the layers
  bool checkpoint = false;  // compute layers again in backward, to keep their inputs alone
  double layer_us = 0;      // of a layer's forward and backward, on top of their operations
  double sum_us = 0;        // of a sum over tp, on top of its bytes: calls, and waits
  double update_ns = 0;     // AdamW and clipping, of one parameter
  Corrections corrections;  // of a run

  /// Parameters of the table of tokens, which is the head's weight as well.
  int64_t table_parameters() const { return vocabulary * hidden; }
  double layer_parameters() const {
    return static_cast<double>(parameters - table_parameters()) / static_cast<double>(layers);
  }
};

/// Floating-point operations of a sample's forward pass through one layer: a multiplication and an
/// addition for each weight and position, and attention's products, all of them and not only those
/// of earlier positions.
double layer_operations(const Model&);
/// The same of the head.
double head_operations(const Model&);
/// Operations of forward and backward of a sample: backward takes two forwards, and checkpointing
/// one more of the layers.
double step_operations(const Model&);

/// Bytes that autograd keeps of a layer for each sample until its backward pass.
///
/// \param tp  ranks that share the layer: what lies between its norms and sums is cut.
double layer_activations(const Model&, int64_t tp);
/// Bytes of the logits, of their logarithms and gradients, for each sample.
double logit_bytes(const Model&, int64_t tp);
/// Bytes of what one layer hands to the next, for each sample.
double boundary_bytes(const Model&);

}  // namespace ddp::plan
