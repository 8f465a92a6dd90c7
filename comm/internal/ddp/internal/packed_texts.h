// Packs several texts into one, for ranks to exchange: names and messages may hold any characters.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

namespace ddp {

/// Writes each text as its length and itself: "3:foo0:".
inline std::string packed(const std::vector<std::string>& texts) {
  std::string all;
  for (const auto& text : texts) all += std::to_string(text.size()) + ':' + text;
  return all;
}

/// \param all  what packed() made.
/// \throws std::exception  for another text.
inline std::vector<std::string> unpacked(const std::string& all) {
  std::vector<std::string> texts;
  for (size_t at = 0; at < all.size();) {
    const auto colon = all.find(':', at);
    TORCH_INTERNAL_ASSERT(colon != std::string::npos);
    const auto size = std::stoull(all.substr(at, colon - at));
    TORCH_INTERNAL_ASSERT(size < all.size() - colon);
    texts.push_back(all.substr(colon + 1, size));
    at = colon + 1 + size;
  }
  return texts;
}

}  // namespace ddp
