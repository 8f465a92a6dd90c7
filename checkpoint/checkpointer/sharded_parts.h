#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ddp/detail/checkpoint_part.h>
#include <ddp/sharded_tensor.h>

#include <ddp/internal/prepared_load.h>
#include <ddp/internal/tensors_on_host.h>
#include "checkpointer/peers.h"
#include "files/manifest.h"
#include "shards/shard_index.h"

namespace ddp {

using OtherNames = std::map<std::string, std::vector<std::string>>;

/// A part of a checkpoint that is cut over the ranks.
struct ShardedPart {
  std::string name;
  ShardsCallback callback;
  /// Whether a box that several ranks have is a copy on all but the first of them, which writes it.
  /// Else the callback gives copies a replica number.
  bool has_copies = false;
  /// Whether another part, of the same name, reads them.
  bool is_read_elsewhere = false;
  /// Reads the part's own file, which has it whole, where the checkpoint has no shards of it. Null:
  /// there is no such file.
  detail::CheckpointPartPtr whole = nullptr;
  /// Returns the further names of tensors that modules share, by their first. Null: none have any.
  std::function<OtherNames()> other_names = nullptr;
  std::vector<ShardedTensor> shards = {};            // this rank's, from the callback's last call
  std::vector<std::vector<ShardLayout>> ranks = {};  // of the last exchange
  std::map<std::string, TensorKind> tensors = {};    // every tensor that a rank has a shard of
};

/// Copies to host memory what this rank writes of a part, by key. Empty: nothing.
c10::IValue copy_written_shards(const std::vector<ShardedTensor>& shards, TensorsOnHost& copies);

/// Reads this rank's shards of a part from a checkpoint: their ranges of the files that have them.
/// Compares the names, shapes and dtypes of all ranks first, with the same error on every rank.
///
/// \param folder  the checkpoint's.
/// \throws DamagedCheckpoint  a file differs from the manifest. c10::Error  the part does not fit.
PreparedLoad prepare_shards(
    const ShardedPart& part, const Manifest& manifest, const std::string& folder, bool strict);

/// The parts that are cut over the ranks. Each rank keeps the layouts of all ranks, which exchange
/// them after a change.
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

  /// Makes the next exchange gather, because the group has other ranks.
  void forget_exchange() { exchanged_.reset(); }

  /// Lists which rank writes what, by part. \throws c10::ValueError  as make_index(), on every
  /// rank.
  const std::map<std::string, ShardIndex>& index();

 private:
  void gather(CheckpointPeers& peers, const std::string& doing);

  std::vector<ShardedPart> parts_;
  std::string own_;                       // this rank's layouts
  std::optional<std::string> exchanged_;  // own_ at the last exchange
  std::optional<std::map<std::string, ShardIndex>> index_;
};

}  // namespace ddp
