#include "tensors/safetensors_header.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include <c10/core/ScalarType.h>
#include <c10/util/accumulate.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <ddp/internal/utf8.h>

#include "files/json_reader.h"

namespace ddp {
namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kLengthBytes = kSafetensorsLengthBytes;
constexpr const char* kMetadata = "__metadata__";

struct NamedDtype {
  const char* name;
  at::ScalarType dtype;
};

constexpr std::array<NamedDtype, 19> kDtypes{{
    {"F64", at::kDouble},
    {"F32", at::kFloat},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U64", at::kUInt64},
    {"U32", at::kUInt32},
    {"U16", at::kUInt16},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
    {"C64", at::kComplexFloat},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
    {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
    {"F8_E8M0", at::kFloat8_e8m0fnu},
}};

std::string list_text(const std::vector<int64_t>& numbers) {
  return ddp::str("[", joined_by(", ", numbers), "]");
}

// Nothing where the product is beyond 64 bits.
std::optional<int64_t> byte_count(const TensorKind& kind) {
  auto bytes = static_cast<int64_t>(c10::elementSize(kind.dtype));
  for (const auto size : kind.sizes) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return bytes;
}

class HeaderReader {
 public:
  HeaderReader(std::string_view json, uint64_t data_bytes, const std::string& path)
      : json_(json), data_bytes_(data_bytes), path_(path) {}

  SafetensorsHeader read(uint64_t data_begin) {
    json_.object([&](const std::string& name) {
      check(seen_.insert(name).second, name, "one entry of a name", "two");
      if (name == kMetadata) {
        read_metadata();
      } else {
        read_tensor(name);
      }
    });
    json_.expect_end();
    check_offsets();
    for (const auto& [begin, end] : offsets_) {
      header_.begins.push_back(data_begin + static_cast<uint64_t>(begin));
    }
    return std::move(header_);
  }

 private:
  using Range = std::pair<int64_t, int64_t>;

  template <typename Value>
  void check(bool holds, const std::string& name, const std::string& rule, const Value& value) {
    DDP_CHECK(
        holds, path_, ": expected ", rule, " for \"", name, "\", got ", value,
        ". Copy or save the file again.");
  }

  void read_metadata() {
    json_.object([&](const std::string& key) {
      const auto value = json_.text();
      check(header_.metadata.emplace(key, value).second, kMetadata, "each key once", key);
    });
  }

  at::ScalarType dtype_of(const std::string& name, const std::string& dtype) {
    const auto* found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const NamedDtype& known) {
      return dtype == known.name;
    });
    check(found != kDtypes.end(), name, "a dtype that LibTorch has", ddp::str('"', dtype, '"'));
    return found->dtype;
  }

  void read_tensor(const std::string& name) {
    std::optional<std::string> dtype;
    std::optional<std::vector<int64_t>> sizes, offsets;
    json_.object([&](const std::string& field) {
      bool is_new = false;
      if (field == "dtype") {
        is_new = !std::exchange(dtype, json_.text());
      } else if (field == "shape") {
        is_new = !std::exchange(sizes, json_.numbers());
      } else if (field == "data_offsets") {
        is_new = !std::exchange(offsets, json_.numbers());
      }
      check(is_new, name, "dtype, shape and data_offsets once each", ddp::str('"', field, '"'));
    });
    check(dtype && sizes && offsets, name, "dtype, shape and data_offsets", "fewer");
    TensorKind kind{dtype_of(name, *dtype), *sizes};
    check(
        std::all_of(sizes->begin(), sizes->end(), [](int64_t size) { return size >= 0; }), name,
        "a shape of numbers >= 0", list_text(*sizes));
    check(
        offsets->size() == 2 && 0 <= (*offsets)[0] && (*offsets)[0] <= (*offsets)[1] &&
            static_cast<uint64_t>((*offsets)[1]) <= data_bytes_,
        name, ddp::str("data_offsets [begin, end] within ", data_bytes_, " bytes"),
        list_text(*offsets));
    const Range range{(*offsets)[0], (*offsets)[1]};
    const auto bytes = byte_count(kind);
    check(
        bytes == range.second - range.first, name,
        ddp::str(
            "data_offsets that span the bytes of ", list_text(*sizes), " ", *dtype, ", ",
            bytes ? std::to_string(*bytes) : "more than 2^63"),
        list_text(*offsets));
    header_.tensors.push_back({name, std::move(kind)});
    offsets_.push_back(range);
  }

  // Each byte of the data is in one tensor.
  void check_offsets() {
    std::vector<size_t> order(offsets_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(
        order.begin(), order.end(), [&](size_t a, size_t b) { return offsets_[a] < offsets_[b]; });
    int64_t end = 0;
    for (const auto i : order) {
      check(
          offsets_[i].first == end, header_.tensors[i].name,
          ddp::str("data_offsets that begin at ", end, ", where the tensor before ends"),
          offsets_[i].first);
      end = offsets_[i].second;
    }
    DDP_CHECK(
        static_cast<uint64_t>(end) == data_bytes_, path_, ": expected ", end,
        " bytes of tensors after the header, got ", data_bytes_, ". Copy or save the file again.");
  }

  JsonReader json_;
  const uint64_t data_bytes_;
  const std::string& path_;
  std::unordered_set<std::string> seen_;
  SafetensorsHeader header_;
  std::vector<Range> offsets_;  // of the header's tensors
};

}  // namespace

uint64_t bytes_of(const TensorKind& kind) {
  return static_cast<uint64_t>(c10::multiply_integers(kind.sizes)) * c10::elementSize(kind.dtype);
}

uint64_t safetensors_header_bytes(
    std::string_view front, uint64_t file_bytes, const std::string& path) {
  uint64_t length = 0;
  DDP_CHECK(
      front.size() >= kLengthBytes, path, ": expected a file of safetensors, got ", front.size(),
      " bytes. Check whether it is the right file.");
  std::memcpy(&length, front.data(), sizeof(length));
  DDP_CHECK(
      length <= kMaxHeaderBytes, path,
      ": expected a file of safetensors, with a header of at most ", kMaxHeaderBytes,
      " bytes, got ", length, ". Check whether it is the right file.");
  DDP_CHECK(
      length <= file_bytes - kLengthBytes, path, ": expected ", length,
      " bytes of a header of safetensors, got ", file_bytes - kLengthBytes,
      ". Copy the file again.");
  return kLengthBytes + length;
}

SafetensorsHeader read_safetensors_header(
    std::string_view header, uint64_t file_bytes, const std::string& path) {
  const auto json = header.substr(kLengthBytes);
  DDP_CHECK(
      is_utf8(json) && json.substr(0, 1) == "{", path,
      ": expected a header of safetensors that begins with { and is UTF-8, got another. Check "
      "whether it is the right file.");
  try {
    return HeaderReader(json, file_bytes - header.size(), path).read(header.size());
  } catch (const std::invalid_argument& error) {
    DDP_CHECK(
        false, path, ": ", error.what(), " of the header of safetensors. Copy or save it again.");
  }
  return {};
}

std::string make_safetensors_header(
    const std::vector<NamedKind>& tensors, const Metadata& metadata, const std::string& path) {
  std::vector<std::string> entries;
  if (!metadata.empty()) {
    std::vector<std::string> pairs;
    for (const auto& [key, value] : metadata) {
      DDP_CHECK_VALUE(
          is_utf8(key) && is_utf8(value), path, ": expected metadata in UTF-8, got other bytes in ",
          json_text(key), ". Encode them.");
      pairs.push_back(ddp::str(json_text(key), ":", json_text(value)));
    }
    entries.push_back(ddp::str(json_text(kMetadata), ":{", joined_by(",", pairs), "}"));
  }
  uint64_t end = 0;
  for (const auto& [name, kind] : tensors) {
    DDP_CHECK_VALUE(
        is_utf8(name) && name != kMetadata, path,
        ": expected names of tensors in UTF-8 and none that is __metadata__, got ", json_text(name),
        ". Rename it.");
    const auto* dtype = std::find_if(
        kDtypes.begin(), kDtypes.end(),
        [dtype = kind.dtype](const NamedDtype& known) { return dtype == known.dtype; });
    DDP_CHECK_VALUE(
        dtype != kDtypes.end(), path, ": expected dtypes that safetensors has, got ", kind.dtype,
        " for \"", name, "\". Convert it.");
    const auto begin = std::exchange(end, end + bytes_of(kind));
    entries.push_back(ddp::str(
        json_text(name), ":{\"dtype\":\"", dtype->name, "\",\"shape\":[",
        joined_by(",", kind.sizes), "],\"data_offsets\":[", begin, ",", end, "]}"));
  }
  auto json = ddp::str("{", joined_by(",", entries), "}");
  json.resize((json.size() + 7) / 8 * 8, ' ');  // so that the elements are aligned
  DDP_CHECK_VALUE(
      json.size() <= kMaxHeaderBytes, path, ": expected a header of at most ", kMaxHeaderBytes,
      " bytes, got ", json.size(), ". Write several files.");
  const uint64_t length = json.size();
  std::string header(kLengthBytes, '\0');
  std::memcpy(header.data(), &length, sizeof(length));
  return header + json;
}

std::vector<std::pair<std::string, std::string>> read_safetensors_index(
    std::string_view json, const std::string& path) {
  std::vector<std::pair<std::string, std::string>> files;
  std::unordered_set<std::string> seen;
  bool has_map = false;
  const auto read_map = [&](JsonReader& reader) {
    reader.object([&](const std::string& name) {
      const auto file = reader.text();
      DDP_CHECK(
          seen.insert(name).second, path, ": expected each name once in weight_map, got \"", name,
          "\" twice. Save the index again.");
      DDP_CHECK(
          !file.empty() && file.find('/') == std::string::npos, path,
          ": expected files beside the index in weight_map, got \"", file, "\" for \"", name,
          "\". Move the files there.");
      files.emplace_back(name, file);
    });
  };
  try {
    JsonReader reader(json);
    reader.object([&](const std::string& field) {
      if (field == "weight_map" && !has_map) {
        has_map = true;
        read_map(reader);
      } else {
        reader.skip_value();
      }
    });
    reader.expect_end();
  } catch (const std::invalid_argument& error) {
    DDP_CHECK(false, path, ": ", error.what(), ". Name an index of files of safetensors.");
  }
  DDP_CHECK(
      has_map, path,
      ": expected \"weight_map\" in an index of files of safetensors, got none. Check whether it "
      "is the right file.");
  return files;
}

}  // namespace ddp
