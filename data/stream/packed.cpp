#include <cstddef>
#include <deque>
#include <utility>

#include <ATen/ops/empty.h>
#include <ddp/detail/packed_source.h>
#include <ddp/detail/stream_source.h>
#include <ddp/internal/check.h>

namespace ddp::detail {

StreamReader::~StreamReader() = default;
StreamSourceBase::~StreamSourceBase() = default;

namespace {

constexpr const char* kSubject = "ShardedStream: expected to load the document of packed() in ";

struct PackedOptions {
  TokensOf tokens_of;
  size_t length;
  std::optional<int64_t> end;
};

/// Holds the documents that the next sequence begins with; their tokens before `used_` of the first
/// one were in sequences before.
class PackedReader final : public StreamReader {
 public:
  PackedReader(
      const StreamSourceBase& source, const std::vector<size_t>& order, const StreamMark& from,
      const PackedOptions& options)
      : source_(source),
        order_(order),
        documents_(source.read(order, from)),
        options_(options),
        used_(static_cast<size_t>(from.within)),
        held_(-from.within) {}

  StreamLoad next() override {
    while (held_ < static_cast<int64_t>(options_.length)) {
      if (!read_document()) return nullptr;
    }
    auto sequence =
        std::make_shared<at::Tensor>(at::empty({static_cast<int64_t>(options_.length)}, at::kLong));
    auto* to = sequence->mutable_data_ptr<int64_t>();
    while (used_ == begun_.front().tokens.size()) drop_document();
    last_ = mark();
    for (size_t i = 0; i < options_.length; ++i) {
      while (used_ == begun_.front().tokens.size()) drop_document();
      to[i] = begun_.front().tokens[used_++];
    }
    held_ -= static_cast<int64_t>(options_.length);
    while (!begun_.empty() && used_ == begun_.front().tokens.size()) drop_document();
    return [sequence]() -> std::shared_ptr<void> { return sequence; };
  }

  StreamMark mark() const override {
    auto mark = begun_.empty() ? documents_->mark() : begun_.front().mark;
    mark.within = static_cast<int64_t>(used_);
    return mark;
  }
  StreamMark last() const override { return last_; }

 private:
  struct Document {
    StreamMark mark;
    std::vector<int64_t> tokens;
  };

  bool read_document() {
    const auto load = documents_->next();
    if (!load) return false;
    Document document{documents_->last(), {}};
    const auto problem = problem_of([&] { document.tokens = options_.tokens_of(load().get()); });
    DDP_CHECK(
        problem.empty(), kSubject, place(document), ", got an error: ", problem,
        ". All ranks need it to find the sequences after it, so next() throws again: let the "
        "transform catch the error and return an empty document to leave it out.");
    if (options_.end) document.tokens.push_back(*options_.end);
    DDP_CHECK(
        !begun_.empty() || document.tokens.size() >= used_, kSubject, place(document),
        " with at least ", used_, " tokens, as before, got ", document.tokens.size(),
        ". Let the transform make the same document each time.");
    held_ += static_cast<int64_t>(document.tokens.size());
    begun_.push_back(std::move(document));
    return true;
  }

  std::string place(const Document& document) const {
    return source_.place(order_[static_cast<size_t>(document.mark.file)], document.mark);
  }

  void drop_document() {
    begun_.pop_front();
    used_ = 0;
  }

  const StreamSourceBase& source_;
  const std::vector<size_t> order_;
  const std::unique_ptr<StreamReader> documents_;
  const PackedOptions options_;
  std::deque<Document> begun_;
  size_t used_;
  StreamMark last_;
  int64_t held_;  // tokens that no sequence had; negative until the first document is read again
};

class PackedSource final : public StreamAdaptor {
 public:
  PackedSource(StreamSourcePtr documents, const PackedOptions& options)
      : StreamAdaptor(std::move(documents)), options_(options) {}

  std::unique_ptr<StreamReader> read(
      const std::vector<size_t>& order, const StreamMark& from) const override {
    return std::make_unique<PackedReader>(inner(), order, from, options_);
  }

  std::vector<Field> fields() const override {
    auto fields = StreamAdaptor::fields();
    fields.emplace_back("packed length", std::to_string(options_.length));
    fields.emplace_back("packed end", options_.end ? std::to_string(*options_.end) : "none");
    return fields;
  }

 private:
  const PackedOptions options_;
};

}  // namespace

StreamSourcePtr packed_source(
    StreamSourcePtr documents, TokensOf tokens_of, int64_t length, std::optional<int64_t> end) {
  DDP_CHECK_VALUE(
      length >= 1, "packed: expected a length >= 1, got ", length,
      ". Give the number of tokens of a sequence.");
  return std::make_shared<const PackedSource>(
      std::move(documents), PackedOptions{tokens_of, static_cast<size_t>(length), end});
}

}  // namespace ddp::detail
