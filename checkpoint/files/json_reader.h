#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ddp {

/// Reads JSON from its front. The caller says what comes next.
///
/// All members throw std::invalid_argument, with what was expected and the byte, for text that is
/// anything else.
class JsonReader {
 public:
  /// \param json  outlives this.
  explicit JsonReader(std::string_view json) : json_(json) {}

  /// Skips `c` if it is next.
  bool accept(char c);
  void expect(char c);
  /// The end of the text, but for spaces.
  void expect_end();

  /// Reads a string, as UTF-8.
  std::string text();
  /// Reads the string `name` and the colon after it.
  void key(const char* name);
  /// Reads a comma, and then as key().
  void next_key(const char* name);
  /// Reads an integer.
  int64_t number();
  /// Reads any number.
  double real();
  /// Reads [1, 2].
  std::vector<int64_t> numbers();
  void skip_value();

  /// Calls `read` for each item between two brackets.
  template <typename Read>
  void list(char open, char close, const Read& read) {
    expect(open);
    if (accept(close)) return;
    do {
      read();
    } while (accept(','));
    expect(close);
  }

  /// Calls `read(name)` for each member of an object, before its value. Names may repeat.
  template <typename Read>
  void object(const Read& read) {
    list('{', '}', [&] {
      const auto name = text();
      expect(':');
      read(name);
    });
  }

 private:
  [[noreturn]] void fail(const std::string& expected) const;
  void skip_spaces();
  char next(const char* expected);
  uint32_t four_digits();
  void append_escaped(std::string& text);

  std::string_view json_;
  size_t at_ = 0;
  int depth_ = 0;  // of skip_value()
};

}  // namespace ddp
