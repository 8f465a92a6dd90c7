// The index of sharded parts as JSON.
#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>

#include <c10/core/ScalarType.h>
#include <ddp/internal/file_io.h>
#include <ddp/internal/json_text.h>
#include <ddp/internal/text.h>

#include "files/json_reader.h"
#include "shards/shard_index.h"

namespace ddp {
namespace {

std::string json_numbers(const std::vector<int64_t>& numbers) {
  return ddp::str("[", joined_by(", ", numbers), "]");
}

std::string json_texts(const std::vector<std::string>& texts) {
  std::vector<std::string> quoted;
  for (const auto& text : texts) quoted.push_back(json_text(text));
  return ddp::str("[", joined_by(", ", quoted), "]");
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
      "]", tensor.other_names.empty() ? "" : ", \"other_names\": " + json_texts(tensor.other_names),
      "}");
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

void check_inside(const Box& box, const std::vector<int64_t>& sizes) {
  bool fits = box.offset.size() == sizes.size() && box.size.size() == sizes.size();
  for (size_t d = 0; fits && d < sizes.size(); ++d) {
    fits = box.offset[d] >= 0 && box.size[d] >= 0 && box.offset[d] <= sizes[d] &&
           box.size[d] <= sizes[d] - box.offset[d];
  }
  if (!fits) throw std::invalid_argument("expected boxes within their tensor's sizes, got another");
}

/// Checks that every element is in one box, as a load needs it.
void check_whole(const IndexedTensor& tensor) {
  const auto numel = [](const std::vector<int64_t>& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), 1.0, std::multiplies<>());
  };
  double found = 0;
  std::vector<const Box*> boxes;
  for (const auto& box : tensor.boxes) {
    found += numel(box.box.size);
    boxes.push_back(&box.box);
  }
  std::sort(
      boxes.begin(), boxes.end(), [](const Box* a, const Box* b) { return a->offset < b->offset; });
  if (const auto both = find_overlap(boxes)) {
    throw std::invalid_argument(
        "expected each element in one box, got " + box_text(both->common) + " in two");
  }
  if (found < numel(tensor.kind.sizes)) {
    throw std::invalid_argument("expected boxes of all elements of a tensor, got fewer");
  }
}

IndexedTensor read_tensor(JsonReader& json) {
  IndexedTensor tensor;
  json.expect('{');
  json.key("dtype");
  tensor.kind.dtype = dtype_named(json.text());
  json.next_key("sizes");
  tensor.kind.sizes = json.numbers();
  json.next_key("boxes");
  json.list('[', ']', [&] {
    auto& box = tensor.boxes.emplace_back();
    json.expect('[');
    box.file = json.text();
    if (!is_name_in_folder(box.file)) {
      throw std::invalid_argument(ddp::str("\"", box.file, "\" is not beside it"));
    }
    json.expect(',');
    box.key = json.text();
    json.expect(',');
    box.box.offset = json.numbers();
    json.expect(',');
    box.box.size = json.numbers();
    json.expect(']');
    check_inside(box.box, tensor.kind.sizes);
  });
  if (json.accept(',')) {
    json.key("other_names");
    json.list('[', ']', [&] { tensor.other_names.push_back(json.text()); });
  }
  json.expect('}');
  check_whole(tensor);
  return tensor;
}

}  // namespace

std::string index_to_json(const std::map<std::string, ShardIndex>& parts) {
  return json_object(parts, "  ", [](const ShardIndex& part) {
    return json_object(
        part, "    ", [](const IndexedTensor& tensor) { return json_tensor(tensor); });
  });
}

std::map<std::string, ShardIndex> read_index(JsonReader& json) {
  std::map<std::string, ShardIndex> parts;
  json.object([&](const std::string& name) {
    auto& part = parts[name];
    json.object([&](const std::string& tensor) { part.emplace(tensor, read_tensor(json)); });
  });
  return parts;
}

}  // namespace ddp
