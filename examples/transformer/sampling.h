#pragma once

#include <string>

#include "model.h"
#include "text.h"

namespace transformer {

/// Continues a prompt: draws one character after the other from the model's predictions.
///
/// \param prompt  at least one character of the text.
/// \return the prompt and `options.sample` characters, the same for the same seed.
///
/// Collective: as the model's forward().
std::string sample(
    LanguageModel& model, const Text& text, const std::string& prompt, const Options& options);

}  // namespace transformer
