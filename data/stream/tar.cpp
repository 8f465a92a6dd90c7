#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ops/from_blob.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <ddp/stream_sources.h>

#include "stream/files.h"
#include "stream/lib_archive.h"

namespace ddp {
namespace {

constexpr int kArchiveOk = 0, kArchiveEof = 1, kArchiveWarn = -20;
constexpr mode_t kRegularFile = 0100000;

/// A file of an archive.
struct TarEntry {
  std::string key, extension;
  Bytes bytes;
  int64_t offset = 0;  // of its header
};

/// The files of one sample.
struct TarGroup {
  std::string key;
  std::vector<std::pair<std::string, Bytes>> files;
};

/// Cuts a name at the first dot after the last slash; nothing for names that are no part of a
/// sample.
std::optional<std::pair<std::string, std::string>> cut_name(const std::string& name) {
  const auto slash = name.rfind('/');
  const auto begin = slash == std::string::npos ? 0 : slash + 1;
  const auto dot = name.find('.', begin);
  const bool is_meta =
      name.size() >= 4 && begins_with(name, "__") && name.substr(name.size() - 2) == "__";
  if (dot == std::string::npos || dot == begin || is_meta) return std::nullopt;
  auto extension = name.substr(dot + 1);
  for (auto& c : extension) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return std::pair{name.substr(0, dot), std::move(extension)};
}

/// The regular files of an archive, one by one.
class TarEntries {
 public:
  TarEntries(std::string path, std::shared_ptr<FileView> view, int64_t offset)
      : path_(std::move(path)), view_(std::move(view)), lib_(lib_archive()) {
    open(0);
    is_plain_ = lib_.filter_code(handle_.get(), 0) == 0;
    if (is_plain_ && offset > 0) open(static_cast<size_t>(offset));
  }

  std::optional<TarEntry> next() {
    while (true) {
      ::archive_entry* entry = nullptr;
      const int result = lib_.read_next_header(handle_.get(), &entry);
      if (result == kArchiveEof) return std::nullopt;
      check(result);
      TarEntry found;
      found.offset = static_cast<int64_t>(begin_) + lib_.read_header_position(handle_.get());
      const auto name =
          lib_.entry_filetype(entry) == kRegularFile ? cut_name(name_of(entry)) : std::nullopt;
      auto bytes = read_bytes(static_cast<size_t>(lib_.entry_size(entry)));
      if (!name) continue;
      std::tie(found.key, found.extension) = *name;
      found.bytes = std::move(bytes);
      return found;
    }
  }

 private:
  struct Free {
    void operator()(::archive* handle) const { lib_archive().read_free(handle); }
  };

  void check(int result) const {
    DDP_CHECK(
        result == kArchiveOk || result == kArchiveWarn,
        "ShardedStream: expected a whole tar file \"", path_, "\", got: ", error_text(),
        ". Copy or write it once more.");
  }
  const char* error_text() const {
    const char* text = lib_.error_string(handle_.get());
    return text != nullptr ? text : "an unknown error of libarchive";
  }

  void open(size_t begin) {
    begin_ = begin;
    handle_.reset(lib_.read_new());
    DDP_CHECK(handle_, "ShardedStream: expected memory for libarchive, got none. Use less of it.");
    check(lib_.read_support_format_tar(handle_.get()));
    check(lib_.read_support_filter_all(handle_.get()));
    check(lib_.read_open_memory(handle_.get(), view_->data() + begin, view_->size() - begin));
  }

  // The first is the name's bytes as they are, where the locale can stand for them.
  std::string name_of(::archive_entry* entry) const {
    const char* name = lib_.entry_pathname(entry);
    if (name == nullptr) name = lib_.entry_pathname_utf8(entry);
    return name != nullptr ? name : "";
  }

  // Plain archives: the bytes where they lie. Else, and with holes, a copy.
  Bytes read_bytes(size_t size) const {
    Bytes bytes;
    std::shared_ptr<std::string> copy;
    size_t end = 0;
    while (true) {
      const void* data = nullptr;
      size_t count = 0;
      int64_t at = 0;
      const int result = lib_.read_data_block(handle_.get(), &data, &count, &at);
      if (result == kArchiveEof) break;
      check(result);
      auto* here = const_cast<char*>(static_cast<const char*>(data));  // of a private mapping
      if (is_plain_ && at == 0 && count == size) {
        bytes = {here, size, view_};
        end = size;
        continue;
      }
      if (!copy) copy = std::make_shared<std::string>(size, '\0');
      const auto to = static_cast<size_t>(at);
      if (count > 0 && to <= size && count <= size - to) std::memcpy(&(*copy)[to], here, count);
      end = to + count;
    }
    DDP_CHECK(
        end <= size, "ShardedStream: expected files of the sizes in their headers in \"", path_,
        "\", got ", end, " bytes of ", size, ". Write it once more.");
    if (copy) bytes = {copy->data(), size, copy};
    if (bytes.data == nullptr && size > 0) {  // one hole
      copy = std::make_shared<std::string>(size, '\0');
      bytes = {copy->data(), size, copy};
    }
    return bytes;
  }

  const std::string path_;
  const std::shared_ptr<FileView> view_;
  const LibArchive& lib_;
  size_t begin_ = 0;  // in the file
  std::unique_ptr<::archive, Free> handle_;
  bool is_plain_ = true;  // not compressed; else offsets count bytes of what is compressed
};

using TarSample = std::map<std::string, std::string>;

std::shared_ptr<void> copied_group(const TarGroup& group) {
  auto sample = std::make_shared<TarSample>();
  sample->emplace("__key__", group.key);
  for (const auto& [name, bytes] : group.files) {
    sample->emplace(
        std::piecewise_construct, std::forward_as_tuple(name),
        std::forward_as_tuple(bytes.data, bytes.size));
  }
  return sample;
}

std::shared_ptr<void> viewed_group(const TarGroup& group) {
  auto sample = std::make_shared<TarView>();
  sample->key = group.key;
  for (const auto& [name, bytes] : group.files) {
    // Else headers alone are read, ahead of the bytes, and the kernel sees no sequence.
    read_pages(bytes);
    sample->files.emplace(
        name, at::from_blob(
                  bytes.data, {static_cast<int64_t>(bytes.size)}, [owner = bytes.owner](void*) {},
                  at::dtype(at::kByte)));
  }
  return sample;
}

using MakeTarSample = std::shared_ptr<void> (*)(const TarGroup&);

/// The samples of an archive: one file ahead, whose other name ends a sample.
class TarFile final : public RecordFile {
 public:
  TarFile(
      std::string path, const std::shared_ptr<FileView>& view, int64_t offset, MakeTarSample make)
      : path_(path), entries_(std::move(path), view, offset), make_(make) {
    do {
      ahead_ = entries_.next();
    } while (ahead_ && ahead_->offset < offset);
  }

  detail::StreamLoad next() override {
    if (!ahead_) return nullptr;
    const auto group = std::make_shared<TarGroup>();
    group->key = ahead_->key;
    while (ahead_ && ahead_->key == group->key) {
      for (const auto& [name, bytes] : group->files) {
        DDP_CHECK(
            name != ahead_->extension,
            "ShardedStream: expected a sample's files to have different ", "names, got two \"",
            group->key, ".", name, "\" in \"", path_, "\". Write each file of a sample once.");
      }
      group->files.emplace_back(std::move(ahead_->extension), std::move(ahead_->bytes));
      ahead_ = entries_.next();
    }
    return [group, make = make_] { return make(*group); };
  }
  int64_t offset() const override { return ahead_ ? ahead_->offset : INT64_MAX; }

 private:
  const std::string path_;
  TarEntries entries_;
  const MakeTarSample make_;
  std::optional<TarEntry> ahead_;
};

class TarSource final : public FilesSource {
 public:
  TarSource(const char* kind, std::vector<std::string> files, MakeTarSample make)
      : FilesSource(kind, std::move(files)), make_(make) {
    lib_archive();
  }

 private:
  class EmptyFile final : public RecordFile {
    detail::StreamLoad next() override { return nullptr; }
    int64_t offset() const override { return 0; }
  };

  std::unique_ptr<RecordFile> open(
      const std::string& path, std::shared_ptr<FileView> view, int64_t offset) const override {
    if (offset == INT64_MAX) return std::make_unique<EmptyFile>();
    return std::make_unique<TarFile>(path, view, offset, make_);
  }

  const MakeTarSample make_;
};

}  // namespace

StreamSource<TarSample> tar_shards(std::vector<std::string> files) {
  return StreamSource<TarSample>(
      std::make_shared<const TarSource>("tar_shards", std::move(files), copied_group));
}

StreamSource<TarView> tar_views(std::vector<std::string> files) {
  return StreamSource<TarView>(
      std::make_shared<const TarSource>("tar_views", std::move(files), viewed_group));
}

}  // namespace ddp
