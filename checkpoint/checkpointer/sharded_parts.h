#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpointer/peers.h"
#include "shards/sharded_part.h"

namespace ddp {

/// The parts that are cut over the ranks. Each rank knows what every rank has of them; the ranks
/// exchange that when it changes.
class ShardedParts {
 public:
  void add(const std::string& name, ShardsCallback callback) { add({name, std::move(callback)}); }
  void add(ShardedPart part) { parts_.push_back(std::move(part)); }
  const std::vector<ShardedPart>& all() const { return parts_; }
  bool contains(const std::string& name) const;

  /// Calls the callbacks.
  ///
  /// \throws c10::ValueError  a shard that cannot be; and the callbacks' exceptions.
  void refresh();

  /// Drops what refresh() took: a callback may return tensors that live for the call alone.
  void release();

  /// Returns a text that is not "" where this rank's layouts changed since the last exchange.
  std::string change() const;

  /// Gathers the ranks' layouts where one of the ranks' change() is not "", and numbers copies.
  ///
  /// \throws c10::Error  on every rank: the ranks add different parts, or tensors differ.
  void exchange(
      CheckpointPeers& peers, const std::vector<std::string>& changes, const std::string& doing);

  /// The ranks are others: the next exchange gathers.
  void forget_exchange() { exchanged_.reset(); }

  /// Lists which rank writes what, by part. \throws c10::ValueError  as make_index(), on every
  /// rank.
  const std::map<std::string, ShardIndex>& index();

 private:
  void gather(CheckpointPeers& peers, const std::string& doing);

  std::vector<ShardedPart> parts_;
  std::string own_;                       // this rank's layouts
  std::optional<std::string> exchanged_;  // those that the other ranks know
  std::optional<std::map<std::string, ShardIndex>> index_;
};

}  // namespace ddp
