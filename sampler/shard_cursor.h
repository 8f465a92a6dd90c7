#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/serialize/archive.h>

#include "order.h"

namespace ddp {

/// Iterates one rank's share of the order of each epoch; the copies of a sampler share one cursor.
///
/// The public members are those of `ShardedSampler`. Thread safety: all of them, by one lock.
class ShardCursor {
 public:
  struct Options {
    /// The sampler's name in messages.
    std::string name;
    Order order;
    /// The share to take of each order; its order_size and offset do not matter.
    ShardSpec shard;
    int64_t seed = 0;
    bool advance_epoch = false;
  };

  explicit ShardCursor(Options options);

  void set_epoch(int64_t epoch);
  int64_t epoch() const;
  void reset(std::optional<size_t> new_size);
  std::optional<std::vector<size_t>> next(size_t batch_size);
  std::optional<std::vector<size_t>> next_of(size_t global);
  void consume(size_t samples);
  int64_t size() const;
  int64_t offset() const;
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  const Options& options() const { return options_; }

  /// A named integer, in an archive and in messages, that affects which indices come.
  struct Field {
    const char* key;
    int64_t value;
  };

  /// Returns the fields that a position in the order depends on.
  std::vector<Field> identifying_fields() const;
  /// Returns the fields that decide the order of the next epoch; they must be equal on all ranks.
  std::vector<Field> common_fields() const;

  /// How far this rank is, for the comparison with other ranks that rebind() needs.
  struct Standing {
    int64_t epoch = 0;
    /// Positions of the order that all ranks have visited, if each used as many samples as this.
    int64_t position = 0;
    /// The position of this rank's next sample; at the end of a share that is shorter than another
    /// rank's, it lies after the last samples of all ranks.
    int64_t next_own = 0;
    int64_t step_size = 1;
    /// Whether nothing of the epoch is left.
    bool over = false;
  };
  Standing standing() const;
  /// Moves this rank there, among the ranks as they are.
  void go_to(const Standing& standing);

  /// Makes this rank `rank` of `num_replicas`, which share what is left after `agreed`.
  void rebind(int64_t num_replicas, int64_t rank, const Standing& agreed);

 private:
  /// The position at which the next reset begins.
  struct Start {
    int64_t epoch = 0;
    /// Positions of the order that were visited before; not 0 only after load() and rebind().
    int64_t offset = 0;
    /// The step size its order is drawn with: this run's, or after load() the saving run's.
    int64_t step_size = 1;
    /// Whether the user chose it: by construction, set_epoch or load, and not since the last reset.
    bool chosen = true;
  };

  /// The calls that take an epoch's indices. An epoch has one kind, so that its position has one
  /// meaning. Equal on all ranks, also where a share is empty. Over: rebind() found the epoch over,
  /// and both calls return its end.
  enum class Drawing { None, Batches, Steps, Over };

  /// The epoch being visited.
  struct Visit {
    Start start;
    /// This rank's indices: with Batches from `start` on, with Steps of the whole order.
    std::vector<size_t> indices;
    Drawing drawing = Drawing::None;
    /// With Batches: the number of indices that next() returned, and that consume() counted.
    size_t handed_out = 0;
    size_t consumed = 0;
    /// With Steps: the position after the last step, and how many samples a step has.
    int64_t visited = 0;
    int64_t step = 0;
  };

  void go_to_locked(const Standing& standing);
  void reset_locked(std::optional<size_t> new_size);
  void repeat_or_advance();
  void resize(int64_t new_size);
  Start start_of(int64_t epoch) const;
  ShardSpec shard_at(int64_t offset) const;
  Visit draw(const Start& start, const ShardSpec& share) const;
  Visit& begin(Drawing drawing, const char* function);
  void begin_steps(int64_t step);
  int64_t own_positions_before(int64_t position) const;
  size_t used() const { return counts_consumed_ ? visit_->consumed : visit_->handed_out; }
  bool is_visiting() const;
  bool is_over() const;
  Start position() const;

  Options options_;
  Start next_;
  std::optional<Visit> visit_;
  bool counts_consumed_ = false;
  bool warned_ = false;
  mutable std::mutex mutex_;
};

/// Finds the ranks that share a dataset: those of a sampler's options, or else of the default
/// group.
///
/// \return a shard of that rank among them, with everything else at its default.
/// \throws c10::ValueError  num_replicas < 1, or a rank outside [0, num_replicas).
/// \throws c10::Error  one is unset while there is no default group.
ShardSpec shard_of_rank(
    const char* sampler, std::optional<int64_t> num_replicas, std::optional<int64_t> rank);

/// Copies the options that all samplers have in common; each sampler sets the rest (order, tail,
/// ...).
///
/// \throws c10::Error  as shard_of_rank.
template <typename SamplerOptions>
ShardCursor::Options cursor_options(const char* name, const SamplerOptions& options) {
  ShardCursor::Options cursor;
  cursor.name = name;
  cursor.shard = shard_of_rank(name, options.num_replicas(), options.rank());
  cursor.seed = options.seed();
  cursor.advance_epoch = options.advance_epoch();
  return cursor;
}

}  // namespace ddp
