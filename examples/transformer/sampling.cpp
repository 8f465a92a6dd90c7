#include "sampling.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

namespace transformer {

std::string sample(
    const PredictNext& predict_next, const Text& text, const std::string& prompt,
    const Options& options) {
  const auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(options.seed));
  auto numbers = text.encode(prompt);
  for (int64_t i = 0; i < options.sample; ++i) {
    const auto seen = numbers.slice(0, -options.shape.context).unsqueeze(0);
    const auto logits = predict_next(seen).to(at::kCPU) / options.temperature;
    const auto next = at::multinomial(logits.softmax(1), 1, /*replacement=*/false, random);
    numbers = at::cat({numbers, next[0]});
  }
  return text.decode(numbers);
}

}  // namespace transformer
