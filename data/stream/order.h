// The order of an epoch, and a rank's part of it, as they are read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ddp/detail/stream_source.h>

namespace ddp {

/// Where a buffer begins.
struct BufferStart {
  int64_t position = 0;  // in the order; a multiple of the buffer's size
  detail::StreamMark mark;
};

/// A sample that is not loaded yet.
struct StreamRecord {
  detail::StreamLoad load;
  detail::StreamMark mark;
};

/// The source and the numbers that decide the order of an epoch.
struct StreamOrder {
  detail::StreamSourcePtr source;
  std::vector<size_t> files;  // in the order in which they are read
  uint64_t seed = 0;          // of seed and epoch
  int64_t buffer = 0;         // samples; 0: not shuffled
};

/// \return 0, 1, ..., count - 1; shuffled, another order for each seed.
std::vector<size_t> shuffled_numbers(size_t count, uint64_t seed);

/// Reads the samples of an order from a buffer on.
class OrderReader {
 public:
  OrderReader(StreamOrder order, const BufferStart& from);

  /// Reads on to a position, which must not be before that of the last call.
  ///
  /// \return null after the last sample. Its load is the caller's to take.
  /// \throws  what reading throws.
  StreamRecord* at(int64_t position);
  /// The buffer with the position of the last call.
  const BufferStart& buffer() const { return start_; }
  const StreamOrder& order() const { return order_; }

 private:
  bool read_buffer();

  const StreamOrder order_;
  const std::unique_ptr<detail::StreamReader> reader_;
  BufferStart start_;
  std::vector<StreamRecord> records_;  // the buffer's, shuffled
};

/// The samples of an order that a rank gets.
struct RankPart {
  int64_t base = 0;  // the position at which these ranks begin
  int64_t ranks = 1;
  int64_t rank = 0;
  bool whole_rounds = false;  // leave out the last round if a rank has no sample in it
};

/// A sample of a rank, in a round: a sample of each rank.
struct DealtRecord {
  StreamRecord record;
  int64_t position = 0;  // in the order
  BufferStart start;     // the buffer in which its round begins: the same on all ranks
};

/// Reads a rank's samples.
class RecordDealer {
 public:
  RecordDealer(StreamOrder order, const BufferStart& from, const RankPart& part)
      : reader_(std::move(order), from), part_(part), round_(part.base) {}

  std::optional<DealtRecord> next();
  const StreamOrder& order() const { return reader_.order(); }

 private:
  OrderReader reader_;
  const RankPart part_;
  int64_t round_;  // the position at which the next one begins
};

}  // namespace ddp
