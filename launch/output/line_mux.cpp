#include "launch/output/line_mux.h"

#include <utility>

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

int LineMux::add_source(std::string prefix) {
  sources_.push_back({std::move(prefix), {}, ""});
  return static_cast<int>(sources_.size()) - 1;
}

void LineMux::feed(int source, std::string_view bytes, std::string& out) {
  if (reader_ == For::Terminal) return take(source, bytes, out);
  std::string plain;
  sources_[source].filter.feed(bytes, plain);
  take(source, plain, out);
}

void LineMux::take(int source, std::string_view bytes, std::string& out) {
  if (bytes.empty()) return;
  std::string& held = sources_[source].held;

  // After a read that ends in "\r", only the next byte distinguishes a frame from a line's "\r\n".
  if (!held.empty() && held.back() == '\r' && bytes.front() != '\n') put_frame(source, {}, out);
  for (;;) {
    size_t end = bytes.find_first_of("\r\n");
    if (end == std::string_view::npos) break;
    if (bytes[end] == '\r') {
      if (end + 1 == bytes.size()) break;
      if (bytes[end + 1] == '\n') ++end;
    }
    const auto line = bytes.substr(0, end + 1);
    line.back() == '\n' ? put(source, line, out) : put_frame(source, line, out);
    bytes.remove_prefix(end + 1);
  }
  held.append(bytes);
  if (held.size() > max_held_) {
    put(source, {}, out);
    mid_line_ = true;
  }
}

void LineMux::finish(int source, std::string& out) {
  if (!sources_[source].held.empty()) put(source, {}, out);
  std::string().swap(sources_[source].held);  // most sources that end are not fed again
  if (open_ == source) {
    out += '\n';
    open_ = kNoSource;
  }
}

/// Writes a frame, which the next frame overwrites.
void LineMux::put_frame(int source, std::string_view bytes, std::string& out) {
  reader_ == For::Terminal ? put(source, bytes, out) : sources_[source].held.clear();
}

/// Appends the held bytes of `source` and then `bytes`: together a line, a frame or a piece of a
/// line.
void LineMux::put(int source, std::string_view bytes, std::string& out) {
  auto& held = sources_[source].held;
  if (open_ != kNoSource && open_ != source) out += '\n';
  if (open_ != source || !mid_line_) out += sources_[source].prefix;
  out += held;
  out += bytes;
  held.clear();
  open_ = out.back() == '\n' ? kNoSource : source;
  mid_line_ = false;
}

}  // namespace ddp::launch
