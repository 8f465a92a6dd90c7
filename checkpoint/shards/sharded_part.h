#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ddp/detail/checkpoint_part.h>
#include <ddp/sharded_tensor.h>

#include <ddp/internal/prepared_load.h>
#include "files/manifest.h"
#include "shards/shard_index.h"

namespace ddp {

using OtherNames = std::map<std::string, std::vector<std::string>>;

/// A part of a checkpoint that is cut over the ranks.
struct ShardedPart {
  std::string name;
  ShardsCallback callback;
  /// Whether boxes that several ranks have are copies, of which the first rank's is written. Else
  /// the callback tells copies by their replica number.
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
  std::map<std::string, TensorKind> tensors = {};    // those that any rank has a shard of
};

/// Numbers equal boxes of several ranks, by rank, so that the first rank's is written.
void number_copies(std::vector<std::vector<ShardLayout>>& ranks);

/// Copies to host memory what this rank writes of a part, by key. Empty: nothing.
c10::IValue copy_written_shards(const std::vector<ShardedTensor>& shards);

/// Reads this rank's shards of a part from a checkpoint: their ranges of the files that have them.
/// Compares the names, shapes and dtypes of all ranks first, with the same error on every rank.
///
/// \param folder  the checkpoint's.
/// \throws DamagedCheckpoint  a file differs from the manifest. c10::Error  the part does not fit.
PreparedLoad prepare_shards(
    const ShardedPart& part, const Manifest& manifest, const std::string& folder, bool strict);

}  // namespace ddp
