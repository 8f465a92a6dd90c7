#include "text.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "../common/data/data_file.h"

namespace transformer {
namespace {

/// Splits a text into characters, which UTF-8 writes in up to four bytes.
std::vector<std::string> characters_of(const std::string& text) {
  std::vector<std::string> characters;
  for (const char byte : text) {
    const bool continues = (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
    if (continues && !characters.empty()) {
      characters.back() += byte;
    } else {
      characters.emplace_back(1, byte);
    }
  }
  return characters;
}

}  // namespace

Text::Text(const std::string& characters, std::string name)
    : name_(std::move(name)), vocabulary_(characters_of(characters)) {
  std::sort(vocabulary_.begin(), vocabulary_.end());
  vocabulary_.erase(std::unique(vocabulary_.begin(), vocabulary_.end()), vocabulary_.end());
  numbers_ = encode(characters);
}

Text Text::read(const std::string& path) {
  examples::DataFile file(path, "a text", "Name one with --text.");
  std::string characters(file.size(), '\0');
  file.read(characters.data(), characters.size());
  return {characters, path};
}

at::Tensor Text::encode(const std::string& characters) const {
  std::vector<int64_t> numbers;
  for (const auto& character : characters_of(characters)) {
    const auto found = std::lower_bound(vocabulary_.begin(), vocabulary_.end(), character);
    TORCH_CHECK_VALUE(
        found != vocabulary_.end() && *found == character, "--prompt: expected characters of ",
        name_, ", got \"", character, "\", which does not occur there.");
    numbers.push_back(found - vocabulary_.begin());
  }
  return at::tensor(numbers, at::kLong);
}

std::string Text::decode(const at::Tensor& numbers) const {
  std::string characters;
  for (int64_t i = 0; i < numbers.size(0); ++i) {
    characters += vocabulary_.at(static_cast<size_t>(numbers[i].item<int64_t>()));
  }
  return characters;
}

Batch Windows::at(const std::vector<size_t>& indices) const {
  const auto rows = at::tensor(std::vector<int64_t>(indices.begin(), indices.end()), at::kLong);
  const auto chosen = windows_.index_select(0, rows);
  const int64_t context = chosen.size(1) - 1;
  return {chosen.narrow(1, 0, context), chosen.narrow(1, 1, context)};
}

Split split(const Text& text, int64_t context) {
  const int64_t held_out = text.size() / 10;
  TORCH_CHECK_VALUE(
      held_out > context, text.name(), ": expected at least ", 10 * (context + 1),
      " characters for --context ", context, ", of which a tenth is held out, got ", text.size(),
      ". Choose a longer text, or a smaller context.");
  const auto& numbers = text.numbers();
  return {
      Windows(numbers.slice(0, 0, text.size() - held_out), context),
      Windows(numbers.slice(0, text.size() - held_out), context)};
}

}  // namespace transformer
