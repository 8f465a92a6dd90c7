// Text that every rank writes and reads in the same way: c10::str, c10::Join and std's streams
// format numbers by std::locale::global, with which a program may group digits: 2.000.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iomanip>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ddp {

/// A std::ostringstream that does not depend on the program's locale.
class OutputText : public std::ostringstream {
 public:
  OutputText() { imbue(std::locale::classic()); }
};

/// A std::istringstream that does not depend on the program's locale.
class InputText : public std::istringstream {
 public:
  explicit InputText(const std::string& text) : std::istringstream(text) {
    imbue(std::locale::classic());
  }
};

/// Concatenates its arguments, as c10::str does.
template <typename... Args>
std::string str(const Args&... args) {
  OutputText text;
  (text << ... << args);
  return text.str();
}

inline bool begins_with(std::string_view text, std::string_view beginning) {
  return text.substr(0, beginning.size()) == beginning;
}

/// Its lines, without their ends.
inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  InputText input(text);
  for (std::string line; std::getline(input, line);) lines.push_back(line);
  return lines;
}

/// The first lines in which two texts differ; "none" after the end of one.
inline std::pair<std::string, std::string> different_lines(
    const std::string& one, const std::string& other) {
  const auto a = lines_of(one), b = lines_of(other);
  size_t i = 0;
  while (i < a.size() && i < b.size() && a[i] == b[i]) ++i;
  return {i < a.size() ? a[i] : "none", i < b.size() ? b[i] : "none"};
}

/// As std::printf writes it.
template <typename... Values>
std::string formatted(const char* form, Values... values) {
  char text[400];  // the largest double has 309 digits
  std::snprintf(text, sizeof text, form, values...);
  return text;
}

/// A number of bytes: "2.5 MiB".
inline std::string mib_text(int64_t bytes) {
  OutputText text;
  text << std::fixed << std::setprecision(1) << static_cast<double>(bytes) / (1 << 20) << " MiB";
  return text.str();
}

/// The values with `separator` between them.
template <typename Values>
std::string joined_by(const char* separator, const Values& values) {
  OutputText text;
  for (const auto& value : values) text << (text.tellp() > 0 ? separator : "") << value;
  return text.str();
}

/// "rank 1", "ranks 1, 2".
template <typename Ranks>
std::string ranks_text(const Ranks& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + joined_by(", ", ranks);
}

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

/// Packs several texts into one, for ranks to exchange: names and messages may hold any characters.
/// Each is its length and itself: "3:foo0:".
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
    const auto size = std::stoull(all.substr(at, colon - at));
    if (colon == std::string::npos || size >= all.size() - colon) {
      throw std::invalid_argument("another text than packed() makes");
    }
    texts.push_back(all.substr(colon + 1, size));
    at = colon + 1 + size;
  }
  return texts;
}

}  // namespace ddp
