#pragma once

#include <functional>
#include <string>

#include <ATen/core/Tensor.h>

#include "options.h"
#include "text.h"

namespace transformer {

/// Maps characters [1, T] to the logits of the next one, [1, vocabulary].
using PredictNext = std::function<at::Tensor(const at::Tensor& characters)>;

/// Continues a prompt: draws one character after the other from a model's predictions.
///
/// \param prompt  at least one character of the text.
/// \return the prompt and `options.sample` characters, the same for the same seed.
///
/// Collective: as `predict_next`.
std::string sample(
    const PredictNext& predict_next, const Text& text, const std::string& prompt,
    const Options& options);

}  // namespace transformer
