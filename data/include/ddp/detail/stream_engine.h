#pragma once

/// The parts of `ShardedStream` (see sharded_stream.h) that work for any type of sample. Not a
/// public header: its names may change at any time.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include <ddp/detail/stream_source.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/serialize/archive.h>

namespace ddp {

struct ShardedStreamOptions;

namespace detail {

/// See ShardedStream, whose members these are.
class DDP_API StreamEngine {
 public:
  StreamEngine(StreamSourcePtr source, const ShardedStreamOptions& options);
  ~StreamEngine();
  StreamEngine(const StreamEngine&) = delete;
  StreamEngine& operator=(const StreamEngine&) = delete;

  /// \return null at the end of the epoch.
  std::shared_ptr<void> next();
  void set_epoch(size_t epoch);
  size_t epoch() const;
  /// Samples that this rank has used since it began or ranks changed; those that threw, too.
  int64_t taken() const;
  /// \throws c10::ValueError  ranks that would begin epochs in different steps.
  void check_epochs() const;
  void check_epochs(const GroupArg& group) const;
  /// \param begun  samples of a batch that is not complete.
  void rebind(const GroupArg& group, int64_t begun);
  std::function<void()> bookmark();
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace detail
}  // namespace ddp
