#include "files/manifest.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <string_view>

#include <ddp/internal/check.h>
#include <ddp/internal/file_io.h>
#include <ddp/internal/text.h>

#include "files/crc32c.h"

namespace ddp {
namespace {

constexpr int64_t kFormat = 1;
constexpr int64_t kShardedFormat = 2;  // with an index
constexpr std::string_view kIndexBegin = "\n  \"index\": ";
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

/// Reads the lines that to_json writes, in their order.
class ManifestLines {
 public:
  ManifestLines(std::string_view text, std::string path)
      : lines_(std::string(text)), path_(std::move(path)) {
    next();
  }

  const std::string& current() const { return line_; }

  void next() {
    if (!std::getline(lines_, line_)) line_.clear();
  }

  /// Reads `  "key": 12,`
  int64_t number(const char* key) {
    int64_t value = 0;
    const auto form = ddp::str("  \"", key, "\": %" SCNd64);
    expect(std::sscanf(line_.c_str(), form.c_str(), &value) == 1, key);
    next();
    return value;
  }

  /// Reads `  "key": "text",`
  std::string text(const char* key) {
    char value[64] = {};
    const auto form = ddp::str("  \"", key, "\": \"%63[^\"]");
    expect(std::sscanf(line_.c_str(), form.c_str(), value) == 1, key);
    next();
    return value;
  }

  /// Reads `    {"name": "model.pt", "bytes": 12, "crc32c": "1a2b3c4d"},`
  ManifestFile file() {
    ManifestFile file;
    char name[256] = {};
    expect(
        std::sscanf(
            line_.c_str(),
            "    {\"name\": \"%255[^\"]\", \"bytes\": %" SCNu64 ", \"crc32c\": \"%8x", name,
            &file.sum.bytes, &file.sum.crc32c) == 3,
        "files");
    file.name = name;
    expect(is_name_in_folder(file.name), "files");
    next();
    return file;
  }

  void expect(bool condition, const char* key) const {
    if (!condition) throw DamagedCheckpoint(ddp::str(path_, " has no \"", key, "\""));
  }

 private:
  InputText lines_;
  const std::string path_;
  std::string line_;
};

}  // namespace

std::string hexadecimal(uint32_t number) {
  char text[9];
  std::snprintf(text, sizeof text, "%08" PRIx32, number);
  return text;
}

const ManifestFile* Manifest::find(const std::string& name) const {
  const auto found = std::find_if(
      files.begin(), files.end(), [&](const ManifestFile& file) { return file.name == name; });
  return found == files.end() ? nullptr : &*found;
}

std::string to_json(const Manifest& manifest) {
  std::string json = ddp::str(
      "{\n  \"format\": ", manifest.index.empty() ? kFormat : kShardedFormat,
      ",\n  \"step\": ", manifest.step, ",\n  \"world_size\": ", manifest.world_size,
      ",\n  \"ddp\": \"", manifest.library_version, "\",\n  \"libtorch\": \"",
      manifest.libtorch_version, "\",\n  \"files\": [\n");
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const auto& [name, sum] = manifest.files[i];
    json += ddp::str(
        "    {\"name\": \"", name, "\", \"bytes\": ", sum.bytes, ", \"crc32c\": \"",
        hexadecimal(sum.crc32c), i + 1 < manifest.files.size() ? "\"},\n" : "\"}\n");
  }
  json += "  ],";
  if (!manifest.index.empty()) json += ddp::str(kIndexBegin, index_to_json(manifest.index), ",");
  json += "\n";
  return ddp::str(json, kSumBegin, hexadecimal(crc32c(0, json.data(), json.size())), kSumEnd);
}

Manifest parse_manifest(const std::string& text, const std::string& path) {
  const auto checked = checked_lines(text, path);
  ManifestLines lines(checked, path);
  lines.next();  // "{"
  const auto format = lines.number("format");
  DDP_CHECK(
      format == kFormat || format == kShardedFormat, path, ": expected format ", kFormat, " or ",
      kShardedFormat, " of checkpoints, got ", format,
      ". Load it with the version of ddp that saved it, or a later one.");
  Manifest manifest;
  manifest.step = lines.number("step");
  manifest.world_size = static_cast<int>(lines.number("world_size"));
  manifest.library_version = lines.text("ddp");
  manifest.libtorch_version = lines.text("libtorch");
  lines.expect(manifest.step >= 0 && manifest.world_size >= 1, "world_size");
  lines.next();  // "files"
  while (lines.current() != "  ],") manifest.files.push_back(lines.file());
  if (format == kShardedFormat) {
    const auto begin = checked.find(kIndexBegin);
    lines.expect(begin != std::string_view::npos, "index");
    try {
      manifest.index = index_from_json(std::string(checked.substr(begin + kIndexBegin.size())));
    } catch (const std::invalid_argument& error) {
      throw DamagedCheckpoint(ddp::str(path, " is damaged: its index: ", error.what()));
    }
  }
  return manifest;
}

}  // namespace ddp
