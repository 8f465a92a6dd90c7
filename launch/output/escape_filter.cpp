#include "launch/output/escape_filter.h"

namespace ddp::launch {
namespace {

constexpr char kEscape = '\x1b';
constexpr char kBell = '\a';

bool ends_control(char byte) { return '@' <= byte && byte <= '~'; }

}  // namespace

EscapeFilter::State EscapeFilter::after_escape(char byte) {
  if (byte == '[') return State::Control;
  if (byte == ']' || byte == 'P' || byte == 'X' || byte == '^' || byte == '_') return State::String;
  const bool goes_on = ' ' <= byte && byte <= '/';  // the name of a character set follows
  return goes_on ? State::Escape : State::Text;
}

void EscapeFilter::feed(std::string_view bytes, std::string& out) {
  for (const char byte : bytes) {
    // A sequence does not span lines, so a newline ends a sequence that lacks its end.
    if (byte == '\n') state_ = State::Text;
    switch (state_) {
      case State::Text:
        byte == kEscape ? void(state_ = State::Escape) : out.push_back(byte);
        break;
      case State::Escape:
        state_ = after_escape(byte);
        break;
      case State::Control:
        if (ends_control(byte)) state_ = State::Text;
        break;
      case State::String:
        if (byte == kBell) state_ = State::Text;
        if (byte == kEscape) state_ = State::StringEscape;
        break;
      case State::StringEscape:
        state_ = byte == '\\' ? State::Text : State::String;
        break;
    }
  }
}

}  // namespace ddp::launch
