#pragma once

#include <string>
#include <string_view>

namespace ddp::launch {

/// Removes terminals' escape sequences (colours, cursor movements, titles) from a stream of bytes.
/// A sequence may be split anywhere between two calls.
class EscapeFilter {
 public:
  /// Appends `bytes` without the sequences to `out`.
  void feed(std::string_view bytes, std::string& out);

 private:
  // ECMA-48: ESC [ parameters final; ESC ] text, ended by BEL or ESC \\; ESC byte.
  enum class State { Text, Escape, Control, String, StringEscape };

  static State after_escape(char byte);

  State state_ = State::Text;
};

}  // namespace ddp::launch
