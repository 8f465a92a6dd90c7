#include "files/manifest.h"

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <functional>
#include <numeric>
#include <string_view>

#include <ATen/core/functional.h>
#include <c10/core/ScalarType.h>
#include <ddp/internal/check.h>
#include <ddp/internal/crc32c.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "files/json_reader.h"

namespace ddp {
namespace {

constexpr int64_t kFormat = 1;
constexpr int64_t kShardedFormat = 2;  // with an index
constexpr std::string_view kSumBegin = "  \"crc32c\": \"";
constexpr std::string_view kSumEnd = "\"\n}\n";
constexpr size_t kSumDigits = 8;

// Returns the lines before the manifest's own sum, after checking that sum. All formats keep the
// sum, which distinguishes a damaged manifest from one of another format.
std::string_view checked_lines(std::string_view text, const std::string& path) {
  const size_t tail = kSumBegin.size() + kSumDigits + kSumEnd.size();
  if (text.size() >= tail) {
    const auto lines = text.substr(0, text.size() - tail);
    const auto own =
        ddp::str(kSumBegin, hexadecimal(crc32c(0, lines.data(), lines.size())), kSumEnd);
    if (text.substr(lines.size()) == own) return lines;
  }
  throw DamagedCheckpoint(path + " is damaged: its own checksum differs");
}

// Reads {"name": "model.pt", "bytes": 12, "crc32c": "1a2b3c4d"}.
ManifestFile read_file(JsonReader& json) {
  ManifestFile file;
  json.expect('{');
  json.key("name");
  file.name = json.text();
  json.next_key("bytes");
  const auto bytes = json.number();
  json.next_key("crc32c");
  const auto sum = json.text();
  json.expect('}');
  file.sum.bytes = static_cast<uint64_t>(bytes);
  std::from_chars(sum.data(), sum.data() + sum.size(), file.sum.crc32c, 16);
  if (!is_name_in_folder(file.name) || bytes < 0 || hexadecimal(file.sum.crc32c) != sum) {
    throw std::invalid_argument("expected a file of the folder, its size and its sum");
  }
  return file;
}

std::string json_numbers(const std::vector<int64_t>& numbers) {
  return ddp::str("[", joined_by(", ", numbers), "]");
}

std::string json_texts(const std::vector<std::string>& texts) {
  return ddp::str("[", joined_by(", ", c10::fmap(texts, json_text)), "]");
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

/// Checks that every element is in one box, as a load needs it.
void check_whole(const IndexedTensor& tensor) {
  const auto numel = [](const std::vector<int64_t>& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), 1.0, std::multiplies<>());
  };
  double found = 0;
  std::vector<const TensorBox*> boxes;
  for (const auto& box : tensor.boxes) {
    found += numel(box.box.size);
    boxes.push_back(&box.box);
  }
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
    if (!is_within(box.box, tensor.kind.sizes)) {
      throw std::invalid_argument("expected boxes within their tensor's sizes, got another");
    }
  });
  if (json.accept(',')) {
    json.key("other_names");
    json.list('[', ']', [&] { tensor.other_names.push_back(json.text()); });
  }
  json.expect('}');
  check_whole(tensor);
  return tensor;
}

// Writes the indices of parts: {"PART": {"NAME": {"dtype": "float32", "sizes": [4], "boxes":
// [["FILE", "KEY", [0], [4]]], "other_names": ["OTHER"]}}}, the last only where there are some.
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

}  // namespace

std::string hexadecimal(uint32_t number) {
  char text[9];
  std::snprintf(text, sizeof text, "%08" PRIx32, number);
  return text;
}

const ManifestFile* Manifest::find(const std::string& name) const {
  const auto found = find_if(files, [&](const ManifestFile& file) { return file.name == name; });
  return found == files.end() ? nullptr : &*found;
}

std::string to_json(const Manifest& manifest) {
  std::string json = ddp::str(
      "{\n  \"format\": ", manifest.index.empty() ? kFormat : kShardedFormat,
      ",\n  \"step\": ", manifest.step, ",\n  \"world_size\": ", manifest.world_size,
      ",\n  \"ddp\": ", json_text(manifest.library_version),
      ",\n  \"libtorch\": ", json_text(manifest.libtorch_version), ",\n  \"files\": [\n");
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const auto& [name, sum] = manifest.files[i];
    json += ddp::str(
        "    {\"name\": ", json_text(name), ", \"bytes\": ", sum.bytes, ", \"crc32c\": \"",
        hexadecimal(sum.crc32c), i + 1 < manifest.files.size() ? "\"},\n" : "\"}\n");
  }
  json += "  ],\n";
  if (!manifest.index.empty()) {
    json += ddp::str("  \"index\": ", index_to_json(manifest.index), ",\n");
  }
  return ddp::str(json, kSumBegin, hexadecimal(crc32c(0, json.data(), json.size())), kSumEnd);
}

Manifest parse_manifest(const std::string& text, const std::string& path) {
  JsonReader json(checked_lines(text, path));
  const auto read_member = [&](const char* key, const auto& read) {
    try {
      json.key(key);
      read();
      json.expect(',');
    } catch (const std::invalid_argument&) {
      throw DamagedCheckpoint(ddp::str(path, " has no \"", key, "\""));
    }
  };
  Manifest manifest;
  int64_t format = 0;
  json.accept('{');
  read_member("format", [&] { format = json.number(); });
  DDP_CHECK(
      format == kFormat || format == kShardedFormat, path, ": expected format ", kFormat, " or ",
      kShardedFormat, " of checkpoints, got ", format,
      ". Load it with the version of ddp that saved it, or a later one.");
  read_member("step", [&] { manifest.step = json.number(); });
  read_member("world_size", [&] {
    manifest.world_size = static_cast<int>(json.number());
    if (manifest.step < 0 || manifest.world_size < 1) throw std::invalid_argument("expected ranks");
  });
  read_member("ddp", [&] { manifest.library_version = json.text(); });
  read_member("libtorch", [&] { manifest.libtorch_version = json.text(); });
  read_member(
      "files", [&] { json.list('[', ']', [&] { manifest.files.push_back(read_file(json)); }); });
  if (format == kFormat) return manifest;
  read_member("index", [&] {
    try {
      manifest.index = read_index(json);
    } catch (const std::invalid_argument& error) {
      throw DamagedCheckpoint(ddp::str(path, " is damaged: its index: ", error.what()));
    }
  });
  return manifest;
}

}  // namespace ddp
