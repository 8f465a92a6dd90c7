// The index of sharded parts as JSON.
#include <stdexcept>

#include <c10/core/ScalarType.h>
#include <ddp/internal/json_text.h>
#include <ddp/internal/text.h>

#include "files/json_reader.h"
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

at::ScalarType dtype_named(const std::string& name) {
  const auto& dtypes = c10::getStringToDtypeMap();
  const auto found = dtypes.find(name);
  if (found == dtypes.end()) {
    throw std::invalid_argument(ddp::str("expected the name of a dtype, got \"", name, '"'));
  }
  return found->second;
}

IndexedTensor read_tensor(JsonReader& json) {
  IndexedTensor tensor;
  json.expect('{');
  json.key("dtype");
  tensor.kind.dtype = dtype_named(json.text());
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
  JsonReader json(text);
  json.object([&](const std::string& name) {
    auto& part = parts[name];
    json.object([&](const std::string& tensor) { part.emplace(tensor, read_tensor(json)); });
  });
  return parts;
}

}  // namespace ddp
