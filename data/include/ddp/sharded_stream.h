#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <ddp/batch_stream.h>
#include <ddp/detail/stream_engine.h>
#include <ddp/process_group.h>
#include <ddp/stream_sources.h>
#include <torch/arg.h>
#include <torch/serialize/archive.h>

namespace ddp {

template <typename T>
class ShardedStream;
template <typename T, typename Collate>
class BatchedStream;

namespace detail {

/// For BatchedStream and BatchStream.
struct StreamAccess {
  template <typename T>
  static StreamEngine& engine(const ShardedStream<T>& stream) {
    return *stream.engine_;
  }
  template <typename T, typename Collate>
  static StreamEngine& engine(const BatchedStream<T, Collate>& stream) {
    return engine(stream.stream_);
  }
};

}  // namespace detail

/// How the ranks' parts of an epoch end.
enum class StreamEnds {
  Join,    ///< with all samples: a rank may have more than another. Train under `ddp::Join`
  Common,  ///< after equally many samples: those that not every rank has are left out
};

/// Options for `make_sharded_stream`; every rank must pass the same, but for `rank`.
///
/// Example:
/// ```
/// auto options = ddp::ShardedStreamOptions().shuffle_buffer(1000).seed(1).workers(2);
/// ```
struct ShardedStreamOptions {
  /// Shuffles the order of the files, and the samples within each buffer of so many: samples
  /// 0 to n - 1, n to 2n - 1, ... of the source. A rank holds the places of so many samples; of a
  /// generator and of packed(), the samples. 0: neither files nor samples. Default: 0
  TORCH_ARG(int64_t, shuffle_buffer) = 0;
  /// Seed of the shuffled orders, which the epoch changes. Default: 0
  TORCH_ARG(int64_t, seed) = 0;
  /// Threads that load and transform this rank's samples, ahead of the loop. 0: next() does it.
  /// Default: 1
  TORCH_ARG(int64_t, workers) = 1;
  /// The most samples that are drawn ahead of the loop, >= 1: at least two batches, so that the
  /// next one is made while the loop computes. Default: 64
  TORCH_ARG(int64_t, depth) = 64;
  /// Give each rank whole files, which no other rank reads, instead of letting the ranks take turns
  /// by sample. Rank r of n reads files r, r + n, ... of the epoch's order. Default: false
  TORCH_ARG(bool, by_shard) = false;
  /// How the ranks' parts end. Default: StreamEnds::Common
  TORCH_ARG(StreamEnds, ends) = StreamEnds::Common;
  /// Number of ranks that share the data, >= 1. Default: the size of the default group; 1 without
  /// one
  TORCH_ARG(std::optional<int64_t>, num_replicas) = {};
  /// This process's number among them, in [0, num_replicas). Default: the rank in the default group
  TORCH_ARG(std::optional<int64_t>, rank) = {};
};

/// A rank's samples of a data set without random access, one by one. Make it with
/// `make_sharded_stream`.
///
/// **Order.** The order of an epoch depends on the source, shuffle_buffer, seed and epoch alone.
/// The ranks take turns: of n ranks, rank r gets samples r, r + n, ... of it. So all ranks read all
/// files, but load and transform only their own samples. With by_shard(true) each rank has an order
/// of its own.
///
/// **Position.** After k samples on each of n ranks, k * n samples of the order are used. save()
/// writes that, and where in the files the buffer begins that is read then: some 100 bytes. Samples
/// that workers have drawn ahead do not count. A stream that loads it goes on there, on any number
/// of ranks: no sample is lost, and none comes twice. It first reads, without loading them, at most
/// the samples of a buffer and of one round of the ranks; of a compressed file, or of a generator
/// without a begin, all before. With by_shard(true) each rank has a position of its own: save it on
/// every rank, in a Checkpointer with add_per_rank. On another number of ranks it goes on between
/// two epochs alone: at the begin, and with StreamEnds::Common at the end.
///
/// **Errors.** A sample whose transform throws counts as one: the next call goes on after it. A
/// loop that catches the error goes on with a sample less in this step. Were it to take another one
/// instead, the ranks would be at different positions. A file that cannot be read throws at each
/// call, and so does a document of packed() that cannot be made.
///
/// Thread safety: none; workers are its own. Movable, but not while a BatchStream or Elastic has
/// it.
template <typename T>
class ShardedStream {
 public:
  /// The type of a sample.
  using Sample = T;

  /// As make_sharded_stream().
  ShardedStream(const StreamSource<T>& source, const ShardedStreamOptions& options)
      : engine_(std::make_unique<detail::StreamEngine>(source.impl(), options)) {}

  /// Waits for this rank's next sample.
  ///
  /// \return nothing at the end of the epoch, and until set_epoch().
  /// \throws c10::Error  a sample that could not be read or transformed, by its place.
  ///
  /// Collective: the first call, where the default group gives the ranks: they compare sources and
  ///   options, and all throw the same error where they differ. With by_shard(true) and
  ///   StreamEnds::Common also once in `depth` samples: on the default group, or rebind()'s.
  ///   Elsewhere no. A rank waits for those that call it later.
  std::optional<T> next() {
    const auto sample = engine_->next();
    if (!sample) return std::nullopt;
    return std::optional<T>(std::move(*static_cast<T*>(sample.get())));
  }

  /// Goes to the begin of an epoch. In the present epoch it goes on, as after load(), unless next()
  /// has returned its end.
  void set_epoch(size_t epoch) { engine_->set_epoch(epoch); }
  /// \return the number last given to set_epoch(), or read by load(); 0 at first.
  size_t epoch() const { return engine_->epoch(); }

  /// Shares what is left of the epoch with the ranks of another group. Call it on all of its ranks
  /// between two steps; a rank that joins first loads what another rank saved.
  ///
  /// \throws c10::Error  on every rank, with the same text, where ranks are at different positions,
  ///         or have other files or options, or with by_shard(true) within an epoch. Nothing has
  ///         changed then.
  ///
  /// Collective: yes. Blocks: host.
  void rebind(const GroupArg& group = {}) { engine_->rebind(group, 0); }
  /// Returns a function that takes the stream back to its present position. It must not be called
  /// after the stream.
  std::function<void()> bookmark() { return engine_->bookmark(); }

  /// Writes the position, and names and sizes of the files and the options, as hashes. Save between
  /// two steps: rank 0's then serves all ranks.
  void save(torch::serialize::OutputArchive& archive) const { engine_->save(archive); }
  /// Goes on at a position that save() wrote.
  ///
  /// \throws c10::ValueError  naming what differs: a stream of other files or options wrote it, or
  ///         with by_shard(true) that of another rank, within an epoch. The stream is then
  ///         unchanged.
  void load(torch::serialize::InputArchive& archive) { engine_->load(archive); }

 private:
  friend struct detail::StreamAccess;

  std::unique_ptr<detail::StreamEngine> engine_;
};

/// Divides a data set without random access among the ranks, and prepares a rank's samples ahead.
///
/// \param source  lines(), tar_shards(), packed_tokens(), from_generator(), transform() or
/// packed(). \throws c10::ValueError  options outside their ranges; fewer files than ranks with
///         by_shard(true).
///
/// Example:
/// ```
/// auto source = ddp::transform(ddp::lines({"a.jsonl", "b.jsonl"}), parse);
/// auto stream = ddp::make_sharded_stream(source,
/// ddp::ShardedStreamOptions().shuffle_buffer(1000)); while (auto sample = stream.next())
/// train(*sample);
/// ```
///
/// Collective: no. Cost: opens no file before next(). Source: torch.utils.data.IterableDataset with
/// webdataset 1.0, whose samples a resumed run does not find again.
template <typename T>
ShardedStream<T> make_sharded_stream(
    const StreamSource<T>& source, const ShardedStreamOptions& options = {}) {
  return ShardedStream<T>(source, options);
}

/// A rank's batches of a ShardedStream. Make it with `batched`.
///
/// Each batch has samples of this rank alone. Positions are those of the stream, between batches:
/// see there, and for its members.
template <typename T, typename Collate>
class BatchedStream {
 public:
  /// The type of a batch.
  using Batch = std::decay_t<std::invoke_result_t<Collate&, std::vector<T>>>;

  /// As batched().
  BatchedStream(ShardedStream<T> stream, size_t batch_size, Collate collate, bool drop_last)
      : stream_(std::move(stream)),
        batch_size_(batch_size),
        collate_(std::move(collate)),
        drop_last_(drop_last) {
    TORCH_CHECK_VALUE(
        batch_size >= 1, "batched: expected a batch_size >= 1, got ", batch_size,
        ". Give the number of samples of a batch.");
  }

  /// Waits for the samples of the next batch, and collates them on this thread.
  ///
  /// \return nothing at the end of the epoch.
  /// \throws  as ShardedStream::next(). A sample that threw keeps its place: the next call goes on
  ///         with the same batch, which has a sample less. So a loop that catches the error and
  ///         calls next() again gets as many batches as the other ranks. Where all samples of a
  ///         batch threw, one more error takes the place of the batch: take a step without data.
  ///
  /// Collective: as ShardedStream::next().
  std::optional<Batch> next() {
    while (places_ < batch_size_ && take_sample()) {
    }
    const auto places = std::exchange(places_, 0);
    auto samples = std::exchange(begun_, {});
    if (places == 0 || (drop_last_ && places < batch_size_)) return std::nullopt;
    TORCH_CHECK(
        !samples.empty(),
        "BatchedStream::next: expected a sample or more in a batch, got errors for ", "all ",
        places, ", which next() threw before. Take a step without data: the next call goes on ",
        "with the next batch.");
    return std::invoke(collate_, std::move(samples));
  }

  /// As ShardedStream's. In the present epoch it goes on with a batch in which next() threw, too.
  void set_epoch(size_t epoch) {
    if (epoch != stream_.epoch()) drop_begun();
    stream_.set_epoch(epoch);
  }
  /// As ShardedStream's.
  size_t epoch() const { return stream_.epoch(); }
  /// As ShardedStream's.
  ///
  /// \throws c10::Error  on every rank also where next() threw in a batch of one: see save().
  ///
  /// Collective: yes. Blocks: host.
  void rebind(const GroupArg& group = {}) {
    detail::StreamAccess::engine(stream_).rebind(group, static_cast<int64_t>(places_));
  }
  /// As ShardedStream's.
  ///
  /// \throws c10::Error  as save().
  std::function<void()> bookmark() {
    check_whole("bookmark");
    return [this, go_back = stream_.bookmark()] {
      drop_begun();
      go_back();
    };
  }
  /// As ShardedStream's.
  ///
  /// \throws c10::Error  next() threw after it took some samples of a batch: call it again before.
  void save(torch::serialize::OutputArchive& archive) const {
    check_whole("save");
    stream_.save(archive);
  }
  /// As ShardedStream's.
  void load(torch::serialize::InputArchive& archive) {
    stream_.load(archive);
    drop_begun();
  }

 private:
  friend struct detail::StreamAccess;

  /// \return false at the end of the epoch.
  bool take_sample() {
    const auto& engine = detail::StreamAccess::engine(stream_);
    const auto before = engine.taken();
    try {
      auto sample = stream_.next();
      if (!sample) return false;
      begun_.push_back(std::move(*sample));
    } catch (...) {
      // A file that cannot be read used no sample.
      places_ += static_cast<size_t>(engine.taken() - before);
      throw;
    }
    ++places_;
    return true;
  }
  void check_whole(const char* caller) const {
    TORCH_CHECK(
        places_ == 0, "BatchedStream::", caller, ": expected a position between batches, got ",
        places_, " samples of a batch in which next() threw. Call next() again before.");
  }
  void drop_begun() {
    begun_.clear();
    places_ = 0;
  }

  ShardedStream<T> stream_;
  size_t batch_size_;
  Collate collate_;
  bool drop_last_;
  std::vector<T> begun_;  // samples of the next batch; not empty only after an error
  size_t places_ = 0;     // of these, and of those that threw
};

/// Makes batches of a stream's samples.
///
/// \param batch_size  samples of this rank in a batch, >= 1.
/// \param collate  takes a std::vector of samples, such as `ddp::pad_collate` for samples of uneven
///        length; returns the batch.
/// \param drop_last  leave out a last batch of fewer samples. Default: false
///
/// Example:
/// ```
/// auto batches = ddp::batched(ddp::make_sharded_stream(source), 32, [](std::vector<Example>
/// samples) {
///   return ddp::pad_collate(samples);
/// });
/// ```
template <typename T, typename Collate>
BatchedStream<T, Collate> batched(
    ShardedStream<T> stream, size_t batch_size, Collate collate, bool drop_last = false) {
  return BatchedStream<T, Collate>(std::move(stream), batch_size, std::move(collate), drop_last);
}

namespace detail {

/// Epochs of a ShardedStream or a BatchedStream, with the members of BatchStream.
template <typename Stream>
class StreamEpochs {
 public:
  /// A sample of the stream, or a batch of samples.
  using Batch = typename decltype(std::declval<Stream&>().next())::value_type;

  /// \param epochs  how many there are in all, whichever the stream is in.
  /// \throws c10::ValueError  StreamEnds::Join on more than one rank, of which some would begin the
  ///         next epoch before the others. So does rebind().
  StreamEpochs(Stream& stream, size_t epochs) : stream_(stream), epochs_(epochs) {
    StreamAccess::engine(stream).check_epochs();
  }
  C10_DISABLE_COPY_AND_ASSIGN(StreamEpochs);

  /// \return nothing after the last epoch.
  std::optional<Batch> next() {
    while (true) {
      auto batch = stream_.next();
      if (batch || stream_.epoch() + 1 >= epochs_) return batch;
      stream_.set_epoch(stream_.epoch() + 1);
    }
  }
  /// The epoch of what next() returns, from 0.
  size_t epoch() const { return stream_.epoch(); }
  /// Collective: yes.
  void rebind(const GroupArg& group = {}) {
    StreamAccess::engine(stream_).check_epochs(group);
    stream_.rebind(group);
  }
  /// Returns a function that takes it back to the present position.
  std::function<void()> bookmark() { return stream_.bookmark(); }
  /// Writes the stream's position.
  void save(torch::serialize::OutputArchive& archive) const { stream_.save(archive); }
  /// Goes on at the position that save() wrote.
  void load(torch::serialize::InputArchive& archive) { stream_.load(archive); }

 private:
  Stream& stream_;
  const size_t epochs_;
};

}  // namespace detail

/// The samples of several epochs of a stream, which must outlive it.
template <typename T>
class BatchStream<ShardedStream<T>> : public detail::StreamEpochs<ShardedStream<T>> {
 public:
  using detail::StreamEpochs<ShardedStream<T>>::StreamEpochs;
};
/// The batches of several epochs of a stream, which must outlive it.
template <typename T, typename Collate>
class BatchStream<BatchedStream<T, Collate>>
    : public detail::StreamEpochs<BatchedStream<T, Collate>> {
 public:
  using detail::StreamEpochs<BatchedStream<T, Collate>>::StreamEpochs;
};
/// The samples of a ShardedStream.
template <typename T>
BatchStream(ShardedStream<T>&, size_t) -> BatchStream<ShardedStream<T>>;
/// The batches of a BatchedStream.
template <typename T, typename Collate>
BatchStream(BatchedStream<T, Collate>&, size_t) -> BatchStream<BatchedStream<T, Collate>>;

}  // namespace ddp
