// Communication hooks.
#include <ddp/comm_hooks.h>
#include <ddp/int8_compress.h>
#include <ddp/power_sgd.h>
#include <ddp/top_k.h>

#include "differential/run.h"

namespace ddp::differential {

void register_hook(RankRun& run, DistributedDataParallelBase* model) {
  using namespace hooks;
  const auto& label = run.program.label("hook");
  const auto& self = run.self;
  auto& trace = run.trace;
  if (label == "own") {
    model->register_comm_hook([&run, inner = hooks::all_reduce(self.group)](GradBucket& bucket) {
      if (run.hook_throws) throw std::runtime_error(kDeliberate);
      return inner(bucket);
    });
  }
  if (label == "all_reduce")
    DDP_DO(trace, model->register_comm_hook(hooks::all_reduce(self.group)));
  if (label == "fp16") DDP_DO(trace, model->register_comm_hook(hooks::fp16_compress(self.group)));
  if (label == "bf16") DDP_DO(trace, model->register_comm_hook(hooks::bf16_compress(self.group)));
  if (label == "fp16_wrapper")
    DDP_DO(
        trace,
        model->register_comm_hook(hooks::fp16_compress_wrapper(hooks::all_reduce(self.group))));
  if (label == "bf16_wrapper")
    DDP_DO(
        trace, model->register_comm_hook(hooks::bf16_compress_wrapper(
                   hooks::top_k(hooks::TopKOptions().ratio(1), self.group))));
  // Each value is its block's largest, and exact in float.
  if (label == "int8")
    DDP_DO(
        trace,
        model->register_comm_hook(hooks::int8_compress(hooks::Int8Options().block(1), self.group)));
  if (label == "int8_channels")
    DDP_DO(
        trace,
        model->register_comm_hook(hooks::Int8Compress(
            hooks::Int8Options().block(16).error_feedback(false).per(hooks::Quantization::Channel),
            self.group)));
  if (label == "fp8")
    DDP_DO(
        trace,
        model->register_comm_hook(hooks::fp8_compress(hooks::Fp8Options().block(1), self.group)));
  if (label == "fp8_blocks")
    DDP_DO(
        trace, model->register_comm_hook(hooks::Fp8Compress(
                   hooks::Fp8Options().dtype(at::kFloat8_e5m2).block(16).error_feedback(false),
                   self.group)));
  if (label == "power_sgd")
    DDP_DO(
        trace, model->register_comm_hook(hooks::PowerSGD(
                   hooks::PowerSGDOptions().start_iter(2).min_compression_rate(0.1), self.group)));
  // As many directions as a gradient can have.
  if (label == "power_sgd_whole") {
    DDP_DO(
        trace, model->register_comm_hook(hooks::power_sgd(
                   hooks::PowerSGDOptions()
                       .matrix_approximation_rank(12)
                       .start_iter(0)
                       .use_error_feedback(false)
                       .warm_start(false)
                       .min_compression_rate(0.01)
                       .batch_tensors_with_same_shape(true),
                   self.group)));
  }
  if (label == "top_k")
    DDP_DO(
        trace, model->register_comm_hook(hooks::TopK(hooks::TopKOptions().ratio(1), self.group)));
  if (label == "top_k_late")
    DDP_DO(
        trace,
        model->register_comm_hook(hooks::TopK(
            hooks::TopKOptions().ratio(1).use_error_feedback(false).start_iter(1), self.group)));
  if (label == "top_k_half")
    DDP_DO(
        trace,
        model->register_comm_hook(hooks::top_k(hooks::TopKOptions().ratio(0.5), self.group)));
  if (label == "noop") DDP_DO(trace, model->register_comm_hook(hooks::noop()));
}

}  // namespace ddp::differential
