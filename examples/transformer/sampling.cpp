#include "sampling.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>

namespace transformer {

std::string sample(
    LanguageModel& model, const Text& text, const std::string& prompt, const Options& options) {
  const c10::NoGradGuard no_grad;
  const auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(options.seed));
  model->eval();
  auto numbers = text.encode(prompt);
  for (int64_t i = 0; i < options.sample; ++i) {
    const auto seen = numbers.slice(0, -options.shape.context).unsqueeze(0).to(model->device());
    const auto logits = model->predict_next(seen).to(at::kCPU) / options.temperature;
    const auto next = at::multinomial(logits.softmax(1), 1, /*replacement=*/false, random);
    numbers = at::cat({numbers, next[0]});
  }
  return text.decode(numbers);
}

}  // namespace transformer
