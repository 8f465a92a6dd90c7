// Text that every rank writes and reads in the same way: c10::str, c10::Join and std's streams
// format numbers by std::locale::global, with which a program may group digits: 2.000.
#pragma once

#include <cstdint>
#include <iomanip>
#include <locale>
#include <sstream>
#include <string>
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

/// Its lines, without their ends.
inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  InputText input(text);
  for (std::string line; std::getline(input, line);) lines.push_back(line);
  return lines;
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

}  // namespace ddp
