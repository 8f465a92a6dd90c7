#include "stream/files.h"

#include <cstring>
#include <set>
#include <utility>

#include <ATen/ops/empty.h>
#include <ddp/internal/check.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/text.h>
#include <ddp/stream_sources.h>

namespace ddp {

using detail::StreamLoad;
using detail::StreamMark;

class FilesSource::Reader final : public detail::StreamReader {
 public:
  Reader(const FilesSource& source, std::vector<size_t> order, const StreamMark& from)
      : source_(source), order_(std::move(order)), at_(from) {}

  StreamLoad next() override {
    for (; at_.file < static_cast<int64_t>(order_.size()); at_ = {at_.file + 1}) {
      if (!open_) {
        const auto file = order_[static_cast<size_t>(at_.file)];
        const auto& path = source_.paths_[file];
        open_ =
            source_.open(path, std::make_shared<FileView>(path, source_.sizes_[file]), at_.offset);
      }
      last_ = {at_.file, open_->offset()};
      auto load = open_->next();
      at_.offset = open_->offset();
      if (load) return load;
      open_.reset();
    }
    return nullptr;
  }

  StreamMark mark() const override { return at_; }
  StreamMark last() const override { return last_; }

 private:
  const FilesSource& source_;
  const std::vector<size_t> order_;
  StreamMark at_, last_;
  std::unique_ptr<RecordFile> open_;
};

FilesSource::FilesSource(const char* kind, std::vector<std::string> paths)
    : kind_(kind), paths_(std::move(paths)) {
  DDP_CHECK_VALUE(!paths_.empty(), kind, ": expected at least one file, got none. Name the files.");
  std::set<std::string> seen;
  for (const auto& path : paths_) {
    DDP_CHECK_VALUE(
        seen.insert(path).second, kind, ": expected each file once, got \"", path,
        "\" twice. Its samples would come twice in an epoch: leave one out.");
    sizes_.push_back(size_of_file(kind, path));
  }
}

std::unique_ptr<detail::StreamReader> FilesSource::read(
    const std::vector<size_t>& order, const StreamMark& from) const {
  return std::make_unique<Reader>(*this, order, from);
}

std::string FilesSource::place(size_t file, const StreamMark& mark) const {
  return ddp::str('"', paths_[file], "\" at byte ", mark.offset);
}

// Names without folders: another machine may have the files elsewhere.
std::vector<FilesSource::Field> FilesSource::fields() const {
  uint64_t names = 0, sizes = 0;
  for (size_t i = 0; i < paths_.size(); ++i) {
    names = mixed(names, fnv1a(paths_[i].substr(paths_[i].rfind('/') + 1)));
    sizes = mixed(sizes, sizes_[i]);
  }
  return {
      {"source", kind_},
      {"files", std::to_string(paths_.size())},
      {"hash of file names", std::to_string(names)},
      {"hash of file sizes", std::to_string(sizes)}};
}

namespace {

class LineFile final : public RecordFile {
 public:
  LineFile(std::shared_ptr<FileView> view, int64_t offset)
      : view_(std::move(view)), at_(static_cast<size_t>(offset)) {}

  StreamLoad next() override {
    if (at_ >= view_->size()) return nullptr;
    const char* begin = view_->data() + at_;
    const auto left = view_->size() - at_;
    const auto* end = static_cast<const char*>(std::memchr(begin, '\n', left));
    const auto length = end != nullptr ? static_cast<size_t>(end - begin) : left;
    at_ += length + 1;
    return [view = view_, begin, length]() -> std::shared_ptr<void> {
      return std::make_shared<std::string>(begin, length);
    };
  }
  int64_t offset() const override { return static_cast<int64_t>(at_); }

 private:
  const std::shared_ptr<FileView> view_;
  size_t at_;
};

class LineSource final : public FilesSource {
 public:
  explicit LineSource(std::vector<std::string> files) : FilesSource("lines", std::move(files)) {}

 private:
  std::unique_ptr<RecordFile> open(
      const std::string& /*path*/, std::shared_ptr<FileView> view, int64_t offset) const override {
    return std::make_unique<LineFile>(std::move(view), offset);
  }
};

constexpr size_t kTokenBytes = 2;

std::shared_ptr<at::Tensor> widened(const char* bytes, size_t length) {
  auto tokens = at::empty({static_cast<int64_t>(length)}, at::kLong);
  auto* to = tokens.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < length; ++i, bytes += kTokenBytes) {
    to[i] = static_cast<unsigned char>(bytes[0]) | static_cast<unsigned char>(bytes[1]) << 8;
  }
  return std::make_shared<at::Tensor>(std::move(tokens));
}

class TokenFile final : public RecordFile {
 public:
  TokenFile(std::shared_ptr<FileView> view, int64_t offset, size_t length)
      : view_(std::move(view)), at_(static_cast<size_t>(offset)), length_(length) {}

  StreamLoad next() override {
    if (view_->size() - at_ < length_ * kTokenBytes) return nullptr;
    const char* begin = view_->data() + at_;
    at_ += length_ * kTokenBytes;
    return [view = view_, begin, length = length_]() -> std::shared_ptr<void> {
      return widened(begin, length);
    };
  }
  int64_t offset() const override { return static_cast<int64_t>(at_); }

 private:
  const std::shared_ptr<FileView> view_;
  size_t at_;
  const size_t length_;
};

class TokenSource final : public FilesSource {
 public:
  TokenSource(std::vector<std::string> files, int64_t length)
      : FilesSource("packed_tokens", std::move(files)), length_(static_cast<size_t>(length)) {
    DDP_CHECK_VALUE(
        length >= 1 && length <= INT64_MAX / 8, "packed_tokens: expected a length >= 1, got ",
        length, ". Give the number of tokens of a sequence.");
    for (size_t i = 0; i < paths().size(); ++i) {
      DDP_CHECK_VALUE(
          sizes()[i] % kTokenBytes == 0, "packed_tokens: expected tokens of 2 bytes, got ",
          sizes()[i], " bytes in \"", paths()[i],
          "\". The file is cut off, or is of another type: write uint16.");
    }
  }

  std::vector<Field> fields() const override {
    auto fields = FilesSource::fields();
    fields.emplace_back("length", std::to_string(length_));
    return fields;
  }

 private:
  std::unique_ptr<RecordFile> open(
      const std::string& /*path*/, std::shared_ptr<FileView> view, int64_t offset) const override {
    return std::make_unique<TokenFile>(std::move(view), offset, length_);
  }

  const size_t length_;
};

}  // namespace

StreamSource<std::string> lines(std::vector<std::string> files) {
  return StreamSource<std::string>(std::make_shared<const LineSource>(std::move(files)));
}

StreamSource<at::Tensor> packed_tokens(std::vector<std::string> files, int64_t length) {
  return StreamSource<at::Tensor>(std::make_shared<const TokenSource>(std::move(files), length));
}

}  // namespace ddp
