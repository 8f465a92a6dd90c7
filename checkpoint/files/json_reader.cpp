#include "files/json_reader.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <stdexcept>

#include <ddp/internal/text.h>

namespace ddp {
namespace {

// More levels than any file has that is read here. Deeper nesting would overflow the stack.
constexpr int kMaxJsonDepth = 64;

void append_utf8(std::string& text, uint32_t code) {
  const auto tail = [&](int shift) {
    text += static_cast<char>(0x80 | ((code >> static_cast<uint32_t>(shift)) & 0x3F));
  };
  if (code < 0x80) {
    text += static_cast<char>(code);
  } else if (code < 0x800) {
    text += static_cast<char>(0xC0 | (code >> 6U));
    tail(0);
  } else if (code < 0x10000) {
    text += static_cast<char>(0xE0 | (code >> 12U));
    tail(6);
    tail(0);
  } else {
    text += static_cast<char>(0xF0 | (code >> 18U));
    tail(12);
    tail(6);
    tail(0);
  }
}

bool is_high_surrogate(uint32_t code) { return code >= 0xD800 && code < 0xDC00; }
bool is_low_surrogate(uint32_t code) { return code >= 0xDC00 && code < 0xE000; }

}  // namespace

void JsonReader::fail(const std::string& expected) const {
  throw std::invalid_argument(ddp::str(
      "expected ", expected, " at byte ", at_, " of JSON, got ",
      at_ < json_.size() ? ddp::str('"', json_.substr(at_, 12), '"') : "its end"));
}

void JsonReader::skip_spaces() {
  while (at_ < json_.size() && std::string_view(" \n\t\r").find(json_[at_]) != std::string::npos) {
    ++at_;
  }
}

bool JsonReader::accept(char c) {
  skip_spaces();
  if (at_ >= json_.size() || json_[at_] != c) return false;
  ++at_;
  return true;
}

void JsonReader::expect(char c) {
  if (!accept(c)) fail(std::string(1, c));
}

void JsonReader::expect_end() {
  skip_spaces();
  if (at_ < json_.size()) fail("the end");
}

char JsonReader::next(const char* expected) {
  if (at_ >= json_.size()) fail(expected);
  return json_[at_++];
}

uint32_t JsonReader::four_digits() {
  uint32_t code = 0;
  const auto digits = json_.substr(at_, 4);
  const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
  if (digits.size() < 4 || end.ptr != digits.data() + 4) fail("four hexadecimal digits");
  at_ += 4;
  return code;
}

void JsonReader::append_escaped(std::string& text) {
  const char code = next("an escape");
  if (code != 'u') {
    const auto known = std::string_view("\"\\/bfnrt").find(code);
    if (known == std::string::npos) fail("an escape");
    text += "\"\\/\b\f\n\r\t"[known];
    return;
  }
  auto number = four_digits();
  if (is_high_surrogate(number)) {
    if (json_.substr(at_, 2) != "\\u") fail("the second half of a character");
    at_ += 2;
    const auto second = four_digits();
    if (!is_low_surrogate(second)) fail("the second half of a character");
    number = 0x10000 + ((number - 0xD800) << 10U) + (second - 0xDC00);
  } else if (is_low_surrogate(number)) {
    fail("the first half of a character");
  }
  append_utf8(text, number);
}

std::string JsonReader::text() {
  expect('"');
  std::string text;
  while (true) {
    const char c = next("the end of a string");
    if (c == '"') return text;
    if (static_cast<unsigned char>(c) < 0x20) fail("no control character in a string");
    if (c == '\\') {
      append_escaped(text);
    } else {
      text += c;
    }
  }
}

void JsonReader::key(const char* name) {
  if (text() != name) fail(ddp::str('"', name, "\" before this"));
  expect(':');
}

void JsonReader::next_key(const char* name) {
  expect(',');
  key(name);
}

int64_t JsonReader::number() {
  skip_spaces();
  int64_t number = 0;
  const auto rest = json_.substr(at_);
  const auto end = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  const auto digits = rest.substr(0, static_cast<size_t>(end.ptr - rest.data()));
  const auto unsigned_digits = digits.substr(digits.substr(0, 1) == "-" ? 1 : 0);
  const bool has_zeros_first = unsigned_digits.size() > 1 && unsigned_digits.front() == '0';
  if (end.ec != std::errc() || has_zeros_first) fail("an integer of 64 bits");
  at_ += digits.size();
  if (at_ < json_.size() && std::string_view(".eE").find(json_[at_]) != std::string::npos) {
    fail("an integer");
  }
  return number;
}

double JsonReader::real() {
  skip_spaces();
  const auto rest = json_.substr(at_);
  double number = 0;
  const auto end = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  // from_chars() reads "inf" and "nan" as well.
  if (end.ec != std::errc() || !std::isfinite(number)) fail("a number");
  at_ += static_cast<size_t>(end.ptr - rest.data());
  return number;
}

std::vector<int64_t> JsonReader::numbers() {
  std::vector<int64_t> numbers;
  list('[', ']', [&] { numbers.push_back(number()); });
  return numbers;
}

void JsonReader::skip_value() {
  skip_spaces();
  if (++depth_ > kMaxJsonDepth) fail("fewer levels");
  const auto rest = json_.substr(at_);
  if (rest.empty()) {
    fail("a value");
  } else if (rest.front() == '"') {
    text();
  } else if (rest.front() == '{') {
    object([&](const std::string& /*name*/) { skip_value(); });
  } else if (rest.front() == '[') {
    list('[', ']', [&] { skip_value(); });
  } else {
    // A number, true, false or null, of which nobody needs the value.
    const auto end = rest.find_first_not_of("+-.0123456789abcdefghijklmnopqrstuvwxyzE");
    if (end == 0) fail("a value");
    at_ += std::min(end, rest.size());
  }
  --depth_;
}

}  // namespace ddp
