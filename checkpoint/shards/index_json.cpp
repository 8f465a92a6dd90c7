// The index of sharded parts as JSON.
#include <charconv>
#include <stdexcept>
#include <string_view>

#include <c10/core/ScalarType.h>
#include <ddp/internal/json_text.h>
#include <ddp/internal/text.h>

#include "shards/shard_index.h"

namespace ddp {
namespace {

std::string json_numbers(const std::vector<int64_t>& numbers) {
  return ddp::str("[", joined_by(", ", numbers), "]");
}

std::string json_tensor(const IndexedTensor& tensor) {
  std::vector<std::string> boxes;
  for (const auto& [file, key, box] : tensor.boxes) {
    boxes.push_back(ddp::str(
        "[", json_text(file), ", ", json_text(key), ", ", json_numbers(box.offset), ", ",
        json_numbers(box.size), "]"));
  }
  return ddp::str(
      "{\"dtype\": \"", c10::getDtypeNames(tensor.kind.dtype).first,
      "\", \"sizes\": ", json_numbers(tensor.kind.sizes), ", \"boxes\": [", joined_by(", ", boxes),
      "]}");
}

// Writes {"name": VALUE, ...}, a line each.
template <typename Values, typename ToJson>
std::string json_object(const Values& values, const char* indent, const ToJson& to_json) {
  std::vector<std::string> lines;
  for (const auto& [name, value] : values) {
    lines.push_back(ddp::str("\n", indent, "  ", json_text(name), ": ", to_json(value)));
  }
  return lines.empty() ? "{}" : ddp::str("{", joined_by(",", lines), "\n", indent, "}");
}

/// Reads JSON of known form from its front.
class JsonCursor {
 public:
  explicit JsonCursor(std::string_view json) : rest_(json) {}

  /// Skips `c` if it is next.
  bool accept(char c) {
    while (!rest_.empty() && (rest_.front() == ' ' || rest_.front() == '\n'))
      rest_.remove_prefix(1);
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  void expect(char c) {
    if (!accept(c)) throw std::invalid_argument(ddp::str("expected ", c, " in the index"));
  }

  std::string text() {
    expect('"');
    std::string text;
    while (rest_.size() > 6 && rest_.front() != '"') {
      const bool is_escape = rest_.front() == '\\';
      if (is_escape) rest_.remove_prefix(1);
      if (is_escape && rest_.front() == 'u') {
        int code = 0;
        std::from_chars(rest_.data() + 1, rest_.data() + 5, code, 16);
        text += static_cast<char>(code);
        rest_.remove_prefix(5);
      } else {
        text += rest_.front();
        rest_.remove_prefix(1);
      }
    }
    expect('"');
    return text;
  }

  void key(const char* name) {
    if (text() != name) throw std::invalid_argument(ddp::str("expected ", name, " in the index"));
    expect(':');
  }

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

  std::vector<int64_t> numbers() {
    std::vector<int64_t> numbers;
    list('[', ']', [&] {
      accept(' ');
      const auto end =
          std::from_chars(rest_.data(), rest_.data() + rest_.size(), numbers.emplace_back());
      rest_.remove_prefix(static_cast<size_t>(end.ptr - rest_.data()));
    });
    return numbers;
  }

 private:
  std::string_view rest_;
};

IndexedTensor read_tensor(JsonCursor& json) {
  IndexedTensor tensor;
  json.expect('{');
  json.key("dtype");
  tensor.kind.dtype = c10::getStringToDtypeMap().at(json.text());
  json.expect(',');
  json.key("sizes");
  tensor.kind.sizes = json.numbers();
  json.expect(',');
  json.key("boxes");
  json.list('[', ']', [&] {
    auto& box = tensor.boxes.emplace_back();
    json.expect('[');
    box.file = json.text();
    json.expect(',');
    box.key = json.text();
    json.expect(',');
    box.box.offset = json.numbers();
    json.expect(',');
    box.box.size = json.numbers();
    json.expect(']');
  });
  json.expect('}');
  return tensor;
}

}  // namespace

std::string index_to_json(const std::map<std::string, ShardIndex>& parts) {
  return json_object(parts, "  ", [](const ShardIndex& part) {
    return json_object(
        part, "    ", [](const IndexedTensor& tensor) { return json_tensor(tensor); });
  });
}

std::map<std::string, ShardIndex> index_from_json(const std::string& text) {
  std::map<std::string, ShardIndex> parts;
  JsonCursor json(text);
  json.list('{', '}', [&] {
    auto& part = parts[json.text()];
    json.expect(':');
    json.list('{', '}', [&] {
      const auto name = json.text();
      json.expect(':');
      part.emplace(name, read_tensor(json));
    });
  });
  return parts;
}

}  // namespace ddp
