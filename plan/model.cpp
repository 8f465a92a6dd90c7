#include "plan/model.h"

namespace ddp::plan {

// Numbers that autograd keeps of a layer for each position and feature of `hidden`. Whole on each
// rank: the inputs of two norms, and what they return.
constexpr double kWhole = 4;
// Cut over tp: queries, keys and values, and the copies that attention makes of them (6), what
// attention returns (1), the hidden features before and after the activation function (8).
constexpr double kCut = 15;
// For each head and pair of positions: attention's weights, as softmax and as the product keep
// them.
constexpr double kScores = 2;

double layer_operations(const Model& model) {
  const auto positions = static_cast<double>(model.sequence);
  const auto hidden = static_cast<double>(model.hidden);
  return 2 * model.layer_parameters() * positions + 4 * positions * positions * hidden;
}

double head_operations(const Model& model) {
  return 2.0 * static_cast<double>(model.table_parameters()) * static_cast<double>(model.sequence);
}

double step_operations(const Model& model) {
  const double forwards = model.checkpoint ? 4 : 3;
  return forwards * static_cast<double>(model.layers) * layer_operations(model) +
         3 * head_operations(model);
}

double layer_activations(const Model& model, int64_t tp) {
  if (model.checkpoint) return boundary_bytes(model);
  const auto positions = static_cast<double>(model.sequence);
  const auto ranks = static_cast<double>(tp);
  const double scores = kScores * static_cast<double>(model.heads) * positions * positions;
  return boundary_bytes(model) * (kWhole + kCut / ranks) + kFloatBytes * scores / ranks;
}

double logit_bytes(const Model& model, int64_t tp) {
  return 3 * kFloatBytes * static_cast<double>(model.vocabulary) *
         static_cast<double>(model.sequence) / static_cast<double>(tp);
}

double boundary_bytes(const Model& model) {
  return kFloatBytes * static_cast<double>(model.sequence) * static_cast<double>(model.hidden);
}

}  // namespace ddp::plan
