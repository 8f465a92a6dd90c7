#include <ddp/activation_checkpoint.h>

#include <ddp/internal/check.h>

namespace ddp {
namespace {

at::Tensor run(torch::nn::Sequential net, int64_t begin, int64_t end, at::Tensor x) {
  for (auto module = net->begin() + begin; module != net->begin() + end; ++module) {
    x = module->any_forward(std::move(x)).get<at::Tensor>();
  }
  return x;
}

}  // namespace

at::Tensor checkpoint_sequential(
    torch::nn::Sequential& net, int64_t segments, at::Tensor input,
    const CheckpointOptions& options) {
  const auto size = static_cast<int64_t>(net->size());
  DDP_CHECK_VALUE(
      segments >= 1 && segments <= size,
      "checkpoint_sequential: expected 1 to as many segments as there are modules, ", size,
      ", got ", segments, ". The square root of the number of modules saves most.");
  const int64_t modules = size / segments;
  for (int64_t segment = 0; segment < segments - 1; ++segment) {
    const auto begin = segment * modules;
    detail::RepeatableCall call;
    call.preserve_rng_state = options.preserve_rng_state();
    call.determinism_check = options.determinism_check();
    for (int64_t i = begin; i < begin + modules; ++i) call.take_from(*net->ptr(i));
    input = detail::checkpoint_call(
        std::move(call),
        [net, begin, modules](const at::Tensor& x) { return run(net, begin, begin + modules, x); },
        std::move(input));
  }
  return run(net, (segments - 1) * modules, size, std::move(input));
}

}  // namespace ddp
