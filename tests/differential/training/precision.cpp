// Dtypes of the wrapper, of units, and of a region of forward.
#include <ddp/autocast.h>

#include "differential/rounding.h"
#include "differential/run.h"

namespace ddp::differential {

namespace {

/// The dtypes that the wrapper and units have both.
template <typename Precision>
void set_dtypes(RankRun& run, Precision& precision) {
  const auto& label = run.program.label("precision");
  auto& trace = run.trace;
  if (label == "half") DDP_DO(trace, precision.param_dtype(torch::kHalf));
  if (label == "float_of_double") DDP_DO(trace, precision.param_dtype(torch::kFloat));
  if (label.find("bf16") == 0) DDP_DO(trace, precision.param_dtype(torch::kBFloat16));
  if (label == "bf16_reduced" || label == "reduce_bf16")
    DDP_DO(trace, precision.reduce_dtype(torch::kBFloat16));
  if (label == "bf16_buffers") DDP_DO(trace, precision.buffer_dtype(torch::kBFloat16));
}

}  // namespace

void set_precision(RankRun& run, DistributedDataParallelOptions& options) {
  auto& trace = run.trace;
  trace.say("MixedPrecision precision;");
  MixedPrecision precision;
  set_dtypes(run, precision);
  if (run.program.is("precision", "bf16_reduced_wide"))
    DDP_DO(trace, precision.reduce_dtype(torch::kFloat));
  DDP_DO(trace, options.mixed_precision(precision));
}

void set_precision(RankRun& run, FullyShardedOptions& options) {
  const auto& label = run.program.label("precision");
  auto& trace = run.trace;
  trace.say("MixedPrecisionPolicy precision;");
  MixedPrecisionPolicy precision;
  set_dtypes(run, precision);
  if (label == "bf16_reduced_wide") DDP_DO(trace, precision.reduce_dtype(torch::kDouble));
  if (label == "bf16_output") DDP_DO(trace, precision.output_dtype(torch::kDouble));
  if (label == "bf16_uncast") DDP_DO(trace, precision.cast_forward_inputs(false));
  if (label == "bf16_kept") DDP_DO(trace, precision.keep_float({"norm"}));
  if (label == "int8_gathers") DDP_DO(trace, precision.gather_int8(true));
  DDP_DO(trace, options.mp_policy(precision));
}

std::string cast_of_input(const Program& program) {
  if (program.is("precision", "bf16_uncast")) return ".to(torch::kBFloat16)";
  return precision_of(program).module == torch::kFloat ? ".to(torch::kFloat)" : "";
}

at::Tensor cast_input(const Program& program, const at::Tensor& x) {
  return program.is("precision", "bf16_uncast") ? x.to(torch::kBFloat16)
                                                : x.to(precision_of(program).module);
}

std::shared_ptr<void> autocast(const Program& program) {
  if (!program.is("precision", "autocast")) return nullptr;
  return std::make_shared<AutocastGuard>(torch::kCPU);
}

}  // namespace ddp::differential
