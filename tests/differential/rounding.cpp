#include "differential/rounding.h"

#include <cmath>
#include <limits>

namespace ddp::differential {

Precision precision_of(const Program& program) {
  Precision result;
  const auto& label = program.label("precision");
  if (label == "float" || label == "autocast" || label == "bf16_kept") {
    result.module = result.forward = torch::kFloat;
    result.of_forward = result.of_gradients = result.of_parameters = 4 * kOfFloat;
  }
  if (label == "autocast") result.autocast = true, result.of_forward = kOfBFloat16;
  const bool is_sharded = program.is("training", "fsdp");
  if (label == "float_of_double") result.forward = torch::kFloat, result.of_forward = kOfFloat;
  if (label == "half") result.forward = torch::kHalf, result.of_forward = kOfHalf;
  if (label.find("bf16") == 0) result.forward = torch::kBFloat16, result.of_forward = kOfBFloat16;
  if (label == "int8_gathers") result.of_forward = 1.0 / 127;
  if (label == "bf16_buffers") result.buffers = torch::kBFloat16;
  if (label == "bf16_output") result.output = torch::kDouble;
  result.casts_inputs = label != "double" && label != "reduce_bf16" && label != "int8_gathers";
  result.of_gradients = std::max(result.of_gradients, result.of_forward);
  // Each rank's gradients are cast and divided, and sums of up to all of them are rounded.
  const double ranks = program.number("ranks");
  const bool reduces_low =
      !is_sharded && (label == "bf16" || label == "bf16_buffers" || label == "half");
  if (reduces_low || label == "reduce_bf16" || label == "bf16_reduced") {
    result.of_gradients = (ranks + 2) * (label == "half" ? kOfHalf : kOfBFloat16);
  }
  if (program.is("hook", "fp16|fp16_wrapper")) result.of_gradients += (ranks + 2) * kOfHalf;
  if (program.is("hook", "bf16|bf16_wrapper")) result.of_gradients += (ranks + 2) * kOfBFloat16;
  if (program.is("hook", "int8|fp8")) {
    result.of_gradients += (ranks + 6) * kOfFloat;
    result.least = std::max(result.least, 1e-36);
  }
  // Of sums in another order, which a step may make larger: Adam's divides by the gradient itself.
  result.of_gradients = std::max(result.of_gradients, 4 * kOfDouble);
  result.of_parameters = std::max(result.of_parameters, kOfDouble);
  if (label == "half" || program.is("hook", "fp16|fp16_wrapper")) result.least = 4 * kOfFloat;
  if (program.is("training", "diloco")) {
    result.of_wire = program.is("wire", "float32") ? kOfFloat
                     : program.is("wire", "int8")  ? 1.0 / 127
                                                   : kOfBFloat16;
  }
  return result;
}

bool keeps_dtype(const Program& program, const std::string& layer) {
  return program.is("precision", "bf16_kept") && layer == "layer_norm";
}

void Noise::add(const at::Tensor& to, double relative, double absolute) {
  if (seed_ == 0 || (relative == 0 && absolute == 0) || to.numel() == 0) return;
  const torch::NoGradGuard no_grad;
  const double largest = to.abs().max().item<double>();
  if (!std::isfinite(largest)) return;
  auto signs = torch::empty(to.sizes(), torch::kDouble);
  double* data = signs.data_ptr<double>();
  for (int64_t i = 0; i < signs.numel(); ++i) data[i] = (seed_ = mix(seed_)) % 2 == 0 ? 1 : -1;
  to.add_(signs * (relative * largest + absolute));
}

namespace {

// The gradients of all parameters, in all steps.
double largest_gradient(const Record& record) {
  double largest = 0;
  for (const auto& [name, value] : record) {
    const bool is_gradient = name.find(" gradient ") != std::string::npos;
    if (!is_gradient || !value.defined() || value.numel() == 0) continue;
    largest = std::max(largest, value.abs().max().item<double>());
  }
  return largest;
}

}  // namespace

std::vector<std::map<std::string, double>> bounds_of(
    const Program& program, const std::vector<Record>& expected) {
  std::vector<std::map<std::string, double>> bounds(expected.size());
  const auto precision = precision_of(program);
  // A small gradient may be the difference of large ones, which the hook sends as floats.
  const double of_sent = program.is("hook", "int8|fp8") ? kOfFloat : 0;
  std::vector<double> least;  // by rank
  for (const auto& record : expected) least.push_back(of_sent * largest_gradient(record));
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    const auto noisy = reference(program, seed);
    for (size_t rank = 0; rank < expected.size(); ++rank) {
      for (const auto& [name, value] : expected[rank]) {
        const auto found = noisy[rank].find(name);
        if (!value.defined() || value.numel() == 0 || found == noisy[rank].end() ||
            !found->second.defined())
          continue;
        const auto difference =
            (found->second.to(torch::kComplexDouble) - value.to(torch::kComplexDouble)).abs();
        auto& bound = bounds[rank][name];
        bound = std::max({bound, least[rank], 8 * difference.max().item<double>()});
        // A rounding that the noises have not met; those of a sum may cancel in each.
        const double largest = value.abs().max().item<double>();
        if (name.find(" parameter ") == std::string::npos)
          bound = std::max(
              bound,
              (name.find(" loss ") != std::string::npos ? 32 : 4) * precision.of_forward * largest);
        if (name.find(" gradient ") != std::string::npos)
          bound = std::max(bound, (precision.of_gradients + precision.of_wire / 8) * largest);
        if (name.find(" loss ") != std::string::npos)
          bound = std::max(bound, (precision.of_gradients + precision.of_wire) / 8 * largest);
        // What is stored in few bits.
        if (value.is_floating_point() && value.scalar_type() != torch::kDouble)
          bound += value.abs().max().item<double>() * 1e-6;
      }
    }
  }
  // A compressed step: only that replicas are equal.
  const int known = program.is("hook", "power_sgd|power_sgd_bf16")              ? 2
                    : program.is("hook", "top_k_half|int8_channels|fp8_blocks") ? 0
                                                                                : 9;
  const bool is_end_known = program.number("steps") <= known;
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    for (const auto& [name, value] : expected[rank]) {
      const bool is_of_forward =
          name.find(" loss ") != std::string::npos || name.find(" buffer ") != std::string::npos;
      const bool is_end = name.compare(0, 3, "end") == 0;
      if (is_end ? !is_end_known : std::stoi(name) - (is_of_forward ? 1 : 0) >= known) {
        bounds[rank][name] = std::numeric_limits<double>::infinity();
      }
    }
  }
  return bounds;
}

bool overflows(const Program& program, int step, int rank) {
  return step == 0 && (program.is("scaler", "overflow") ||
                       (program.is("scaler", "one_rank") && rank == axes_of(program, step).dp - 1));
}

}  // namespace ddp::differential
