#pragma once

#include <iomanip>
#include <string>

#include <ddp/internal/text.h>

namespace ddp {

/// A JSON string, quotes included.
inline std::string json_text(const std::string& text) {
  OutputText json;
  json << '"' << std::hex << std::setfill('0');
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') {
      json << '\\' << c;
    } else if (c < 0x20) {
      json << "\\u" << std::setw(4) << int{c};
    } else {
      json << c;
    }
  }
  json << '"';
  return json.str();
}

}  // namespace ddp
