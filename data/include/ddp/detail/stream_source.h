#pragma once

/// The parts of a stream's source that do not know the type of its samples. Not a public header:
/// its names may change at any time.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/export.h>

namespace ddp::detail {

/// Where a record begins: enough to read on from there.
struct StreamMark {
  int64_t file = 0;    ///< its place in the order in which the epoch reads the files
  int64_t offset = 0;  ///< in the file: bytes, or samples of a generator
  int64_t within = 0;  ///< of packed(): tokens of the document there that were used before
};

/// Makes a record's sample, an object of the source's type. Called at most once, on any thread.
using StreamLoad = std::function<std::shared_ptr<void>()>;

/// Reads records one after the other. One thread at a time calls it.
class DDP_API StreamReader {
 public:
  virtual ~StreamReader();
  /// \return an empty function after the last record.
  virtual StreamLoad next() = 0;
  /// Where to read on with the record that next() returns next.
  virtual StreamMark mark() const = 0;
  /// Where the record that next() returned last begins. mark() before may be the end of a file
  /// before that one.
  virtual StreamMark last() const = 0;
};

/// Files of records, or what takes their place. Does not change: copies of a source share it, and
/// several threads may use it at a time.
class DDP_API StreamSourceBase {
 public:
  /// A fact that decides which records there are, and in which order: equal where they are.
  using Field = std::pair<std::string, std::string>;

  virtual ~StreamSourceBase();
  /// \param order  which files to read, one after the other.
  virtual std::unique_ptr<StreamReader> read(
      const std::vector<size_t>& order, const StreamMark& from) const = 0;
  virtual size_t files() const = 0;
  /// Names the place of a record for an error: "b.jsonl, byte 12".
  virtual std::string place(size_t file, const StreamMark& mark) const = 0;
  virtual std::vector<Field> fields() const = 0;
};

using StreamSourcePtr = std::shared_ptr<const StreamSourceBase>;

/// A source that makes other records of those of an inner one.
class DDP_API StreamAdaptor : public StreamSourceBase {
 public:
  explicit StreamAdaptor(StreamSourcePtr inner) : inner_(std::move(inner)) {}
  size_t files() const override { return inner_->files(); }
  std::string place(size_t file, const StreamMark& mark) const override {
    return inner_->place(file, mark);
  }
  std::vector<Field> fields() const override { return inner_->fields(); }

 protected:
  const StreamSourceBase& inner() const { return *inner_; }

 private:
  StreamSourcePtr inner_;
};

template <typename In, typename Out, typename Transform>
class TransformedSource final : public StreamAdaptor {
 public:
  TransformedSource(StreamSourcePtr inner, Transform transform)
      : StreamAdaptor(std::move(inner)),
        transform_(std::make_shared<const Transform>(std::move(transform))) {}

  std::unique_ptr<StreamReader> read(
      const std::vector<size_t>& order, const StreamMark& from) const override {
    return std::make_unique<Reader>(inner().read(order, from), transform_);
  }

 private:
  struct Reader final : StreamReader {
    Reader(std::unique_ptr<StreamReader> records, std::shared_ptr<const Transform> function)
        : inner(std::move(records)), transform(std::move(function)) {}
    StreamLoad next() override {
      auto load = inner->next();
      if (!load) return nullptr;
      return [load = std::move(load), transform = transform]() -> std::shared_ptr<void> {
        const auto sample = load();
        return std::make_shared<Out>(
            std::invoke(*transform, std::move(*static_cast<In*>(sample.get()))));
      };
    }
    StreamMark mark() const override { return inner->mark(); }
    StreamMark last() const override { return inner->last(); }

    const std::unique_ptr<StreamReader> inner;
    const std::shared_ptr<const Transform> transform;
  };

  std::shared_ptr<const Transform> transform_;
};

/// A generator is one file, whose samples are drawn again up to the place where a reader begins.
template <typename Sample, typename Make>
class GeneratedSource final : public StreamSourceBase {
 public:
  static constexpr bool kBeginsAnywhere = std::is_invocable_v<const Make&, int64_t>;

  explicit GeneratedSource(Make make) : make_(std::move(make)) {}

  std::unique_ptr<StreamReader> read(
      const std::vector<size_t>& order, const StreamMark& from) const override {
    return std::make_unique<Reader>(make_, order.empty() ? StreamMark{1} : from);
  }
  size_t files() const override { return 1; }
  std::string place(size_t /*file*/, const StreamMark& mark) const override {
    return "the generator, sample " + std::to_string(mark.offset);
  }
  std::vector<Field> fields() const override { return {{"source", "generator"}}; }

 private:
  static auto made(const Make& make, int64_t first) {
    if constexpr (kBeginsAnywhere) {
      return make(first);
    } else {
      return make();
    }
  }

  struct Reader final : StreamReader {
    Reader(const Make& make, const StreamMark& from) : draw(made(make, from.offset)), at(from) {
      if (kBeginsAnywhere || at.file > 0) return;
      for (int64_t i = 0; i < at.offset; ++i) draw();
    }
    StreamLoad next() override {
      if (at.file > 0) return nullptr;
      auto drawn = draw();
      if (!drawn) {
        at = {1};
        return nullptr;
      }
      ++at.offset;
      return [sample = std::make_shared<Sample>(std::move(*drawn))]() -> std::shared_ptr<void> {
        return sample;
      };
    }
    StreamMark mark() const override { return at; }
    StreamMark last() const override { return {at.file, at.offset - 1}; }

    std::decay_t<decltype(made(std::declval<const Make&>(), 0))> draw;
    StreamMark at;
  };

  const Make make_;
};

}  // namespace ddp::detail
